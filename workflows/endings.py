"""What the end of an attempt asks of its group: a pure table (durability: status and failure mapping)."""

from dataclasses import dataclass
from typing import Literal

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    TimeoutError,
    TimeoutType,
)

from domain.messages import AttemptFailure, AttemptRef

Kind = Literal["member", "over", "again", "fenced", "broken"]

ERROR_LIMIT = 2_000
"""Characters of an error that travel on; the whole of it stands in the worker's log."""

CANCELLED: dict[str, str] = {
    AttemptFailure.CANCELLED: "cancelled",
    AttemptFailure.TIMED_OUT: "timeout",
}
"""Failures that are no error of anybody's, and what is counted."""

LOSSES = {
    AttemptFailure.LOST,
    AttemptFailure.WORKER_SHUTDOWN,
    "ActivityPause",  # a person paused or reset the activity in the Temporal UI
    "ActivityReset",
}


TRIED_AGAIN = {"stale": "stale", "resident_limit": "cancelled", "human": "cancelled"}
"""Causes of our own cancel requests after which the sample runs again, and what is counted."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended, as its group sees it.

    member: it joined. over: it did not, and nothing follows. again: the ledger decides what follows.
    fenced: another execution owns it, whose result counts. broken: its source broke its contract.
    """

    kind: Kind
    cause: str | None = None
    """Resubmission cause."""
    status: str = "cancelled"
    """Status of the attempt, if the ledger has none yet."""
    lost: bool = False
    """The platform died under it: no failure."""
    error_type: str | None = None
    error: str | None = None
    reward: float | None = None
    ref: AttemptRef | None = None
    """What it returned, if it did."""

    @property
    def told(self) -> str:
        """In a few words, for people."""
        if self.cause is not None:
            return f"{self.status} ({'lost' if self.lost else self.cause})"
        return self.status if self.reward is None else f"{self.status}, reward {self.reward:.4g}"


def of_result(ref: AttemptRef) -> Ending:
    """The ending of an attempt that returned."""
    if ref.member:
        return Ending(kind="member", status=ref.status, reward=ref.reward, ref=ref)
    if ref.resubmit is not None:
        return Ending(kind="again", cause=ref.resubmit, status=ref.status, ref=ref)
    return Ending(kind="over", status=ref.status, ref=ref)


def of_failure(failure: ActivityError, cancel_cause: str | None) -> Ending:
    """The ending of an attempt that failed, was cancelled or ran out of time.

    `cancel_cause` is the cause of our own cancel request, if there was one.
    """
    error = failure.cause
    if isinstance(error, CancelledError):
        cause = TRIED_AGAIN.get(cancel_cause or "")
        return Ending(kind="over") if cause is None else Ending(kind="again", cause=cause)
    if isinstance(error, TimeoutError):
        if error.type in (TimeoutType.SCHEDULE_TO_CLOSE, TimeoutType.START_TO_CLOSE):
            return Ending(kind="again", cause="timeout", error_type="TimeoutError")
        return _lost("TimeoutError", "no heartbeat: the worker died or its loop stood still")
    if isinstance(error, ApplicationError):
        return _of_application_error(error)
    return _lost(type(error).__name__, str(error))


def _of_application_error(error: ApplicationError) -> Ending:
    if error.type in LOSSES:
        return _lost(str(error.type), error.message)
    if error.type == AttemptFailure.FENCED:
        return Ending(kind="fenced")
    if error.type == AttemptFailure.SOURCE_BROKEN:
        return Ending(kind="broken", error_type=error.type, error=error.message[:ERROR_LIMIT])
    cause = CANCELLED.get(error.type or "")
    return Ending(
        kind="again",
        cause=cause or "infra_error",
        status="infra_error" if cause is None else "cancelled",
        error_type=error.type,
        error=error.message[:ERROR_LIMIT],
    )


def _lost(error_type: str, error: str) -> Ending:
    return Ending(
        kind="again",
        cause="infra_error",
        status="infra_error",
        lost=True,
        error_type=error_type,
        error=error[:ERROR_LIMIT],
    )
