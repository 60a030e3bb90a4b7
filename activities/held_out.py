"""One rollout of a held-out evaluation: sampled from one version, kept in memory until it is judged.

It is played as an attempt is, by the same code, with three differences: its version is the evaluated
one, nothing of it enters the ledger but its result, and it is sampled behind the rollouts that are
trained. A program samples at a gateway of the evaluator's own, whose book is `HeldOutBook`.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from activities.access import key_sha256, session_path
from activities.album import Album
from activities.chat import Chat
from activities.gateway_session import Record
from activities.inference import EngineClient, SamplingParams
from activities.session import Beside
from activities.turns import Failed
from domain.config import RunConfig
from domain.errors import BudgetExhausted, EngineError
from domain.ids import fold, policy_name
from domain.images import Image, placed
from domain.messages import AttemptIn
from domain.rollouts import Segment, Task
from domain.tools import Message
from storage.attempts import Started
from storage.sessions import Past, Recorded, Seen, Session

_PRIORITY = 1
"""Behind every rollout that is trained, which ask with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all rollouts of one version are sampled with."""

    engines: EngineClient
    config: RunConfig
    version: int
    chat: Chat
    album: Album
    lost: list[EngineError] = field(default_factory=list)
    """Receives why an engine did not answer: such a rollout says nothing about the policy."""


class HeldOut:
    """Records one rollout; what a source and, beside it, a gateway's session see of it."""

    recorded: Sequence[Segment] = ()
    deadline_reached = False

    def __init__(
        self, asked: Asked, engine: str, which: AttemptIn, task: Task, gateway: str | None
    ) -> None:
        """Nothing is sampled yet.

        Args:
            asked: what it is sampled with.
            engine: base URL of the engine that samples it.
            which: its place among the rollouts of this version, as the gateway names it.
            task: what it plays.
            gateway: base URL of the evaluator's own gateway, where the source samples through one.
        """
        self.version = asked.version
        self.name = f"evaluation/{asked.config.name}@{asked.version}/{task.id}/{which.sample}"
        self.which = which
        self.task = task
        self.base_url = "" if gateway is None else gateway + session_path(which)
        self.api_key = secrets.token_urlsafe(32)
        self.failure: str | None = None
        """Why the gateway could not sample for it."""
        self._asked = asked
        self._engine = engine
        self._requests = 0
        self._segments: list[Segment] = []
        self._calls: list[Recorded] = []
        self._refused: str | None = None
        self._state: Any = None

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
        beside: Beside | None = None,
    ) -> Segment:
        """One request.

        Raises:
            EngineError: no answer, or one that cannot be used; noted in `asked.lost`.
            BudgetExhausted: the engine's tokens for the images fill the context.
        """
        asked, config = self._asked, self._asked.config
        assert config.evaluation is not None
        budget = config.budget.segment_tokens
        number, self._requests = self._requests, self._requests + 1
        try:
            answer = await asked.engines.generate(
                self._engine,
                policy_name(config.name, self.version),
                prompt_ids,
                SamplingParams(
                    max_tokens=min(max_tokens or budget, budget),
                    seed=fold("evaluation", config.seed, self.name, number),
                    temperature=config.evaluation.temperature,
                    stop_token_ids=tuple(sorted(asked.chat.stop_ids)),
                ),
                request_id=f"{self.name}/{number}",
                salt=f"evaluation-{self.version}",
                images=await asked.album.parts(images),
                priority=_PRIORITY,
            )
        except EngineError as error:
            asked.lost.append(error)
            raise
        if images and answer.context > config.max_context_tokens:
            raise BudgetExhausted("context")
        if beside is not None:
            answer = beside.trim(answer)
            self._calls.append(beside.recorded(len(self._segments)))
        segment = Segment(
            answer.prompt_ids or prompt_ids,
            answer.sampled_ids,
            answer.logprobs,
            answer.finish_reason,
            self.version,
            cached_prompt_tokens=answer.cached_prompt_tokens,
            images=placed(images, answer.places),
        )
        self._segments.append(segment)
        return segment

    async def keep(self, image: Image) -> None:
        """See that an image lies in the object store."""
        await self._asked.album.keep(image)

    async def chat(self, messages: list[Message], *, tools: Sequence[Any] = ()) -> Message:
        """Not this one's to answer."""
        raise RuntimeError("play() gives session sources a recorder of its own")

    def progress(self, phase: str, **facts: Any) -> None:
        """Nobody watches."""

    async def save(self, state: Any) -> None:
        """Kept for as long as the rollout is played."""
        self._state = state

    async def saved(self) -> Any | None:
        """The newest value that was kept."""
        return self._state

    # ------------------------------------------------------------ its session at the gateway

    async def refuse(self, cause: str | None) -> None:
        """Note which budget refused the program's last request."""
        self._refused = cause

    async def fail(self, detail: str) -> None:
        """Make it an infra_error; the first reason stands."""
        self.failure = self.failure or detail

    async def look(self) -> Seen:
        """How far its program has come.

        Raises:
            Failed: the gateway could not sample for it.
        """
        if self.failure is not None:
            raise Failed(self.failure)
        return Seen(
            ours=True,
            segments=len(self._segments),
            turns=len({recorded.call for recorded in self._calls}),
            tokens=sum(len(segment.sampled_ids) for segment in self._segments),
            engine=self._engine,
            refused=self._refused,
        )

    async def past(self) -> Past:
        """All that was sampled."""
        return Past(segments=tuple(self._segments), calls=tuple(self._calls))

    @property
    def session(self) -> Session:
        """What its key opens."""
        closed = None if self.failure is None else "has failed"
        started = Started(fence=1, version=self.version, task=self.task)
        return Session(attempt=self.which, started=started, closed=closed, refused=self._refused)


class HeldOutBook:
    """The sessions of the rollouts that are being evaluated."""

    def __init__(self, config: RunConfig, chat: Chat) -> None:
        """No rollout is open."""
        self._config = config
        self._chat = chat
        self._open: dict[bytes, HeldOut] = {}

    def open(self, rollout: HeldOut) -> None:
        """Let its program sample."""
        self._open[key_sha256(rollout.api_key)] = rollout

    def close(self, rollout: HeldOut) -> None:
        """Its key opens nothing any more."""
        self._open.pop(key_sha256(rollout.api_key), None)

    async def look_up(self, digest: bytes) -> Session | None:
        """The session of a rollout that is being played."""
        found = self._open.get(digest)
        return None if found is None else found.session

    async def take_up(self, session: Session) -> tuple[RunConfig, Chat, Record, Past]:
        """The rollout is its own record."""
        (found,) = [r for r in self._open.values() if r.which == session.attempt]
        return self._config, self._chat, found, await found.past()

    async def cause(self, i: AttemptIn) -> Mapping[str, str]:
        """No span."""
        return {}
