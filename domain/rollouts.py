"""The nouns of sampling: a task, its rollouts, their segments.

    task ── group ── sample 0..size-1 ── attempt 0.. ── segment 0..

A *segment* is one sampling request. A *rollout* is what an attempt produced. Token ids are ints,
log-probabilities natural logarithms of the distribution that was sampled from (after temperature
and filters).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from domain.images import PlacedImage


class Status(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # a budget ran out; the cause is recorded
    AGENT_ERROR = "agent_error"  # the agent broke by itself; still scored
    INFRA_ERROR = "infra_error"  # not the policy's fault; never scored
    CANCELLED = "cancelled"


SCORED = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.AGENT_ERROR})
TRUNCATION_CAUSES = (
    "turns",
    "tokens",
    "turn_tokens",
    "context",
    "group_deadline",
    "images",
    "width",
)


@dataclass(frozen=True)
class Task:
    """One prompt or problem. `data` holds JSON values only: it is stored in the ledger."""

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """A verdict. A bare finite float is a Reward without components."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


class Numbers(Protocol):
    """Token ids or log-probabilities: a list, a tuple or a one-dimensional numpy array."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, key: Any, /) -> Any: ...


@dataclass(frozen=True)
class Segment:
    """One sampling request: the whole prompt as ids, what was sampled, and under which version.

    `version` is the oldest version among the sampled tokens; `version_spans` lists
    `(version, tokens)` in order when the engine swapped weights under the request.
    `support` holds, per sampled id, the ids kept by filtered sampling.
    """

    prompt_ids: Numbers
    sampled_ids: Numbers
    logprobs: Numbers
    finish_reason: str
    version: int
    version_spans: Sequence[tuple[int, int]] | None = None
    kv_version: int | None = None
    cached_prompt_tokens: int = 0
    support: Sequence[Numbers] | None = None
    images: tuple[PlacedImage, ...] = ()
    """Which tokens of the prompt stand for images, in order."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """`(version, tokens)` pairs that add up to the sampled tokens."""
        if self.version_spans is not None:
            return self.version_spans
        return ((self.version, len(self.sampled_ids)),) if len(self.sampled_ids) else ()

    @property
    def newest_version(self) -> int:
        """The newest version among the sampled tokens."""
        return max((version for version, _ in self.spans), default=self.version)


@dataclass(frozen=True)
class Rollout:
    """What one attempt at a sample produced. `cause` is the truncation cause, if truncated."""

    task: str
    group: int
    sample: int
    attempt: int
    segments: Sequence[Segment]
    status: Status
    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    cause: str | None = None
    detail: str = ""

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among all sampled tokens; None before the first segment."""
        return min((segment.version for segment in self.segments), default=None)

    @property
    def policy_tokens(self) -> int:
        """Sampled tokens over all segments."""
        return sum(len(segment.sampled_ids) for segment in self.segments)
