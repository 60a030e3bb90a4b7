"""What crosses Temporal: one dataclass in, one out, per workflow and activity, and queue names.

Ids and small numbers only. Tokens stay in the ledger, weights in the object store. Fields are only
ever added, with a default: running workflows must be able to read what older code wrote.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

WORKFLOW_QUEUE = "rollbook-workflows"
LEDGER_QUEUE = "rollbook-ledger"


def rollout_queue(environment: str) -> str:
    """Task queue of the rollout workers that hold this environment."""
    return f"rollout-{environment}"


def environment_of(queue: str) -> str:
    """The environment whose task queue this is."""
    return queue.removeprefix("rollout-")


Closing = Literal["complete", "abandoned", "expired", "cancelled", "source_broken"]


class AttemptFailure(StrEnum):
    """Error types with which `run_attempt` fails (`ApplicationError.type`); all but the last are final.

    Temporal matches them by exact name, so a value is part of the protocol.
    """

    INFRA_ERROR = "INFRA_ERROR"  # not the policy's fault: resubmitted, counted as a failure
    CANCELLED = "CANCELLED"  # the source says so: resubmitted, counted as a failure
    TIMED_OUT = "TIMED_OUT"  # `groups.timeout` is up: resubmitted, counted as a failure
    LOST = "LOST"  # the platform died under it and it cannot resume: resubmitted, no failure
    FENCED = "FENCED"  # a newer execution owns the attempt; nothing was written
    SOURCE_BROKEN = "SOURCE_BROKEN"  # the source broke its contract: the run fails
    WORKER_SHUTDOWN = "WORKER_SHUTDOWN"  # retried by Temporal, on another worker


@dataclass(frozen=True, kw_only=True)
class GroupIn:
    """Input of GroupWorkflow: one generation of one task group."""

    run: str
    group: int
    gen: int
    batch: int
    task: str
    environment: str
    size: int
    samples: tuple[tuple[int, int], ...]  # (sample, attempt) to run, spares included
    kept: int = 0  # members kept from earlier generations
    submitted_version: int = 0
    timeout_s: float | None = None  # seconds from submission
    hard_cap_s: float = 86_400.0  # start_to_close: reclaims the worker slot
    heartbeat_s: float = 60.0
    resumes: int = 2  # Temporal retries of the same logical attempt (resumable environments)
    completion: Literal["wait", "deadline"] = "wait"
    min_members: int | None = None  # under "deadline": the quorum
    on_stragglers: Literal["truncate", "discard", "carry_over"] | None = None
    part0_admitted: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupOut:
    """Result of GroupWorkflow, for people who look at it in the Temporal UI."""

    state: str
    members: int
    resubmitted: dict[str, int] = field(default_factory=dict)
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class BeginGroup:
    """Claims a generation of a group for one workflow execution."""

    run: str
    group: int
    gen: int
    workflow_id: str
    first_execution_run_id: str


@dataclass(frozen=True, kw_only=True)
class AttemptIn:
    """Input of run_attempt: which attempt at which sample."""

    run: str
    group: int
    sample: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class AttemptRef:
    """What run_attempt returns: a reference into the ledger and the verdict. Below 300 bytes."""

    sample: int
    attempt: int
    status: str
    member: bool  # joined the group
    surplus: bool = False  # would have joined, but the group was full
    resubmit: str | None = None  # resubmission cause when the verdict is "again" (`unscored`)
    cause: str | None = None  # truncation cause
    reward: float | None = None
    tokens: int = 0
    turns: int = 0
    version: int | None = None  # the oldest it sampled under, else the one it was pinned to


@dataclass(frozen=True, kw_only=True)
class CloseAttempt:
    """Asks the ledger what follows an attempt that will not join its group."""

    run: str
    group: int
    gen: int
    sample: int
    attempt: int
    cause: str | None  # resubmission cause, or None for surplus, close, human
    status: str = "cancelled"  # status to write if the attempt has none yet
    lost: bool = False  # the platform died under it: no failure, counted as a loss
    error_type: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """The ledger's answer: run this attempt, adopt the one that stands, give the sample up, or close
    the group."""

    next_attempt: int | None = None
    adopted: AttemptRef | None = None  # it had ended in the ledger and joined: its result counts
    give_up: bool = False
    close: Closing | None = None
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class FinishGroup:
    """Ends a generation of a group (or admits part 0 of it)."""

    run: str
    group: int
    gen: int
    outcome: Closing
    part: int = 0
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupVerdict:
    """The group's state in the ledger after FinishGroup; `applied` is False for a lost race."""

    state: str
    applied: bool
    members: int = 0


@dataclass(frozen=True, kw_only=True)
class CancelSample:
    """Signal: stop one attempt, with the ledger's cause. Duplicates are no-ops."""

    sample: int
    attempt: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Close:
    """Signal: stop the whole group."""

    cause: str


SINCE = "%d %b %H:%M:%S"
"""How people are shown since when something is so."""


@dataclass(frozen=True, kw_only=True)
class StuckAttempt:
    """An attempt without progress, as the steward saw it: what people read in the Temporal UI."""

    sample: int
    attempt: int
    waits_on: str
    why: str
    since: str  # when that began, by the steward's clock, as SINCE
    turn: int = 0
    tokens: int = 0
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Signal: these attempts make no progress; none: the group moves again."""

    attempts: tuple[StuckAttempt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LiveAttempt:
    """An attempt that a workflow still answers for: running, or between its end and its successor."""

    sample: int
    attempt: int


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """Answer of GroupWorkflow's query `state`."""

    stage: str
    members: int
    live: tuple[LiveAttempt, ...] = ()
    resubmitted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PublishIn:
    """Input of PublishWorkflow: make engines serve one version."""

    run: str
    version: int
    patience_s: float = 60.0  # plus twice what the first engine took: then the slow are left out


@dataclass(frozen=True, kw_only=True)
class EngineRef:
    """One engine process. `engine` is its base URL; an incarnation ends with the process."""

    run: str
    version: int
    engine: str
    incarnation: int


@dataclass(frozen=True, kw_only=True)
class EngineList:
    """Engines that are alive and must acknowledge a version before it is served."""

    engines: tuple[EngineRef, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Asks whether a version can be served now, without waiting for these engines (base URLs)."""

    run: str
    version: int
    without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublishRefused:
    """Every engine refused a version: the run cannot go on."""

    run: str
    version: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PublishOut:
    """Result of PublishWorkflow."""

    version: int
    served: bool
    acknowledged: int
    engines: int
