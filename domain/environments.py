"""Sources of rollouts: what a user implements.

    kind             the user writes                               rollbook runs
    PromptSource     rows {"prompt": …} and a reward function      one turn
    Env              reset, on_turn, reward, tools                 turn after turn
    SessionSource    async run(task, recorder) -> Outcome          whatever it does
    HarnessSource    a command and a verifier                      a program beside the gateway

What user code raises decides the outcome (`activities/play.py`): `AgentError` from an environment
is the agent's fault and scored; `InfrastructureError` and any other exception is not, and the
rollout is sampled again; a tool's exception is told to the model. A value of the wrong type breaks
the contract and fails the run.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, Protocol, runtime_checkable

from domain.errors import SourceBroken
from domain.images import Image
from domain.rollouts import Reward, Segment, Status, Task
from domain.tools import Message as Message
from domain.tools import Tool, answer_calls

Recovery = Literal["drop", "stateless", "snapshot"]


def task_ids(batch: Mapping[str, Sequence[int]]) -> list[Task]:
    """One task per integer `task_id` row of a batch, named by its decimal id.

    Raises:
        SourceBroken: the batch has no `task_id`, or one is no integer.
    """
    if "task_id" not in batch:
        raise SourceBroken(f"the batch has no 'task_id'; it has {sorted(batch)}")
    tasks = []
    for value in batch["task_id"]:
        try:
            number = index(value)
        except TypeError as error:
            raise SourceBroken(f"task_id {value!r} is no integer") from error
        if isinstance(value, bool):
            raise SourceBroken(f"task_id {value!r} is no integer")
        tasks.append(Task(str(number), {"task_id": number}))
    return tasks


@dataclass(frozen=True)
class TurnResult:
    """What `on_turn` may return to cap the next turn."""

    messages: list[Message]
    max_turn_tokens: int | None = None


@dataclass
class RolloutView:
    """What an environment sees of its rollout so far. Changing `messages` in place has no effect;
    `rewrite` does."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    generated_tokens: int = 0
    context_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Add to it; summed into the step record."""
    rewritten: list[Message] | None = None
    folder: str | None = None
    """The working folder of a harness's program, while it is judged."""
    output: str = ""
    """The end of what a harness's program printed."""

    def rewrite(self, messages: list[Message]) -> None:
        """Replace the history; the next turn starts a new chain from it."""
        self.rewritten = list(messages)

    def count(self, metric: str, amount: float = 1.0) -> None:
        """Add to a metric."""
        self.metrics[metric] = self.metrics.get(metric, 0.0) + amount


class Env:
    """A multi-turn environment, run in the rollout worker.

    Each rollout works on its own shallow copy: what `reset` assigns to `self` belongs to that
    rollout, and what `__init__` made is shared by all of them.
    """

    tools: Sequence[Tool] = ()
    recovery: Recovery = "drop"
    """What becomes of a rollout whose worker died. `drop`: sampled again from the start.
    `stateless`: `reset`, then on after the last committed segment. `snapshot`: `restore` with the
    state saved at the last turn boundary."""

    async def reset(self, task: Task) -> list[Message]:
        """Set up for a task; returns the first messages."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset()")

    async def on_turn(self, rollout: RolloutView) -> list[Message] | TurnResult | None:
        """Answer the model's turn; None ends the rollout. By default the tool calls are run, and a
        turn without any ends the rollout."""
        message = rollout.messages[-1]
        if not message.get("tool_calls"):
            return None
        answered = await answer_calls(message, self.tools)
        rollout.count("tool_calls", len(answered.messages))
        rollout.count("tool_errors", answered.errors)
        rollout.count("malformed_tool_calls", answered.malformed)
        return answered.messages

    async def reward(self, rollout: RolloutView, task: Task) -> float | Reward:
        """Judge a rollout that ended by itself, or by an `AgentError`."""
        raise NotImplementedError(f"{type(self).__name__} must implement reward()")

    async def on_truncated(
        self, rollout: RolloutView, task: Task, cause: str
    ) -> float | Reward | None:
        """Judge a rollout that ran out of a budget; None is no verdict."""
        return None

    async def snapshot(self, rollout: RolloutView) -> Any:
        """The environment's state at a turn boundary, as a JSON value (`recovery="snapshot"`)."""
        raise NotImplementedError(f"{type(self).__name__} must implement snapshot()")

    async def restore(self, rollout: RolloutView, state: Any) -> None:
        """Set up from what `snapshot` returned, instead of `reset`."""
        raise NotImplementedError(f"{type(self).__name__} must implement restore()")

    async def close(self) -> None:
        """Free what `reset` acquired. Called once however the rollout ends, also half set up."""


class PromptSource:
    """Single turn: rows `{"prompt": str | list[Message], …}`, judged by a function of the text."""

    def __init__(
        self, reward: Callable[[str, Task], float | Reward | Awaitable[float | Reward]]
    ) -> None:
        self.reward = reward


class HarnessSource:
    """Any agent program that speaks the OpenAI API, beside the recording gateway.

    `command`: its words; one that is exactly `{name}` stands for that entry of the task's data.
    `verify`: a function of the rollout and the task, or a command that prints the reward last.
    `workdir`: a folder whose copy each program works in; an empty folder without it.
    `env`: variables; of the worker's own, programs get only a few such as PATH.
    """

    def __init__(
        self,
        command: Sequence[str],
        verify: Callable[[RolloutView, Task], float | Reward] | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = tuple(command)
        self.verify = verify
        self.workdir = workdir
        self.env = dict(env or {})


@dataclass(frozen=True)
class Outcome:
    """How a rollout ended: what a SessionSource returns, and what every source comes down to.

    A SessionSource fills the first four fields; the others are rollbook's own.
    """

    status: Status
    reward: Reward | float | None = None
    cause: str | None = None
    """Truncation cause."""
    detail: str = ""
    turns: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: bool = False
    """Not resumable after its worker died: a loss of the platform, no failure of the sample."""


class Recorder(Protocol):
    """The only way to sample. Every segment is committed before a call returns.

    `sample` and `chat` raise `CancelledError` when the attempt was cancelled, and a `LedgerError`
    when it is owned by someone else; a source must let both pass.
    """

    @property
    def version(self) -> int:
        """The version the next request would use."""

    @property
    def base_url(self) -> str:
        """The gateway's OpenAI base URL, for programs."""

    @property
    def api_key(self) -> str:
        """The attempt's own key at the gateway."""

    async def sample(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Segment:
        """One sampling request."""

    async def chat(
        self, messages: list[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Message:
        """One assistant turn."""

    def progress(self, phase: str, **facts: Any) -> None:
        """Shown in the Temporal UI."""


class AttemptRecorder(Protocol):
    """What the rollout worker's own recorder offers: single requests, what an earlier execution
    left, and whether the group's straggler deadline has passed."""

    @property
    def version(self) -> int:
        """The version the next request would use."""

    @property
    def base_url(self) -> str:
        """The gateway's OpenAI base URL, for programs."""

    @property
    def api_key(self) -> str:
        """The attempt's own key at the gateway."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> Segment:
        """One sampling request, committed before it returns. `images` are the digests of those that
        the prompt's image tokens stand for, in order; the segment's prompt holds their tokens."""

    async def keep(self, image: Image) -> None:
        """See that an image lies in the object store."""

    def progress(self, phase: str, **facts: Any) -> None:
        """Shown in the Temporal UI."""

    @property
    def recorded(self) -> Sequence[Segment]:
        """Segments that were committed before this execution began."""

    @property
    def deadline_reached(self) -> bool:
        """The group closed its doors: stop at this segment boundary."""

    async def save(self, state: Any) -> None:
        """Keep a JSON value that describes the attempt at this turn boundary."""

    async def saved(self) -> Any | None:
        """The newest value that was kept."""


@runtime_checkable
class SessionSource(Protocol):
    """A coroutine that drives its own conversation. A cancel arrives as `CancelledError`.

    With the attribute `gateway = True` it samples at `recorder.base_url`, and only there.
    """

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        """Sample through the recorder and return the outcome, reward included."""


Source = Env | PromptSource | HarnessSource | SessionSource


def samples_at_gateway(source: object) -> bool:
    """Whether the rollouts of this source are sampled through the recording gateway.

    Those of a harness are; a SessionSource says so by the attribute `gateway = True`.
    """
    return isinstance(source, HarnessSource) or getattr(source, "gateway", False) is True


def recovery(source: Source) -> Recovery:
    """How a rollout of this source survives its worker. A prompt's single turn always can."""
    if isinstance(source, PromptSource):
        return "stateless"
    return source.recovery if isinstance(source, Env) else "drop"
