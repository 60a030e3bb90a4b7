"""What each end of an attempt asks of its group, and which errors Temporal never retries."""

from datetime import timedelta
from typing import Any

import pytest
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    RetryState,
    ServerError,
    TerminatedError,
    TimeoutError,
    TimeoutType,
)

from domain import errors
from domain.messages import AttemptFailure, AttemptIn, AttemptRef, GroupIn
from workflows import endings, options
from workflows.endings import Ending


def failed_with(cause: BaseException) -> ActivityError:
    error = ActivityError(
        "activity failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="w",
        activity_type="run_attempt",
        activity_id="s0.a0",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )
    error.__cause__ = cause
    return error


def of(cause: BaseException, cancel_cause: str | None = None) -> Ending:
    return endings.of_failure(failed_with(cause), cancel_cause)


def timed_out(kind: TimeoutType) -> TimeoutError:
    return TimeoutError("timed out", type=kind, last_heartbeat_details=[])


@pytest.mark.parametrize(
    ("failure", "cause", "status", "lost"),
    [
        (AttemptFailure.INFRA_ERROR, "infra_error", "infra_error", False),
        (AttemptFailure.CANCELLED, "cancelled", "cancelled", False),
        (AttemptFailure.TIMED_OUT, "timeout", "cancelled", False),
        (AttemptFailure.LOST, "infra_error", "infra_error", True),
        (AttemptFailure.WORKER_SHUTDOWN, "infra_error", "infra_error", True),
        ("ActivityPause", "infra_error", "infra_error", True),
        ("ActivityReset", "infra_error", "infra_error", True),
        ("KeyError", "infra_error", "infra_error", False),  # a bug: counted, so it ends
    ],
)
def test_a_failure_is_tried_again(failure: str, cause: str, status: str, lost: bool) -> None:
    ending = of(ApplicationError("it broke", type=failure))
    assert (ending.kind, ending.cause, ending.status) == ("again", cause, status)
    assert ending.lost == lost
    assert ending.error == "it broke"


@pytest.mark.parametrize(
    ("kind", "cause", "lost"),
    [
        (TimeoutType.SCHEDULE_TO_CLOSE, "timeout", False),
        (TimeoutType.START_TO_CLOSE, "timeout", False),
        (TimeoutType.HEARTBEAT, "infra_error", True),
        (TimeoutType.SCHEDULE_TO_START, "infra_error", True),
    ],
)
def test_only_its_own_time_limit_is_a_timeout(kind: TimeoutType, cause: str, lost: bool) -> None:
    ending = of(timed_out(kind))
    assert (ending.kind, ending.cause, ending.lost) == ("again", cause, lost)


@pytest.mark.parametrize(
    ("asked", "kind", "cause"),
    [
        ("stale", "again", "stale"),
        ("resident_limit", "again", "cancelled"),
        ("human", "again", "cancelled"),
        ("surplus", "over", None),
        ("close", "over", None),
        ("reopen", "over", None),
        ("abandon", "over", None),
        ("deadline", "over", None),
        (None, "over", None),
    ],
)
def test_a_cancel_of_ours_is_tried_again_by_its_cause(
    asked: str | None, kind: str, cause: str | None
) -> None:
    ending = of(CancelledError("cancelled"), asked)
    assert (ending.kind, ending.cause) == (kind, cause)


@pytest.mark.parametrize("cause", [TerminatedError("gone"), ServerError("server")])
def test_what_nobody_listed_is_a_loss(cause: Exception) -> None:
    assert of(cause).lost


def test_fenced_and_broken_have_endings_of_their_own() -> None:
    assert of(ApplicationError("x", type=AttemptFailure.FENCED)).kind == "fenced"
    broken = of(ApplicationError("not a task", type=AttemptFailure.SOURCE_BROKEN))
    assert (broken.kind, broken.error) == ("broken", "not a task")


def test_a_long_error_does_not_swell_the_history() -> None:
    ending = of(ApplicationError("x" * 100_000, type=AttemptFailure.INFRA_ERROR))
    assert len(str(ending.error)) == endings.ERROR_LIMIT


@pytest.mark.parametrize(
    ("fields", "kind", "cause"),
    [
        ({"status": "completed", "member": True}, "member", None),
        ({"status": "truncated", "member": False, "resubmit": "unscored"}, "again", "unscored"),
        ({"status": "completed", "member": False, "surplus": True}, "over", None),
        ({"status": "cancelled", "member": False}, "over", None),
    ],
)
def test_a_result_joins_is_tried_again_or_is_over(
    fields: dict[str, Any], kind: str, cause: str | None
) -> None:
    ending = endings.of_result(AttemptRef(sample=0, attempt=0, **fields))
    assert (ending.kind, ending.cause) == (kind, cause)


def test_every_error_but_an_absent_engine_and_a_shutdown_is_final() -> None:
    named = set(options.FINAL)
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.RollbookError):
            assert (error.__name__ in named) != issubclass(error, errors.EngineUnavailable)
    assert named >= set(AttemptFailure) - {AttemptFailure.WORKER_SHUTDOWN}
    assert AttemptFailure.WORKER_SHUTDOWN not in named


def test_an_attempt_has_its_own_name_queue_and_limits() -> None:
    group = GroupIn(
        run="r1",
        group=7,
        gen=0,
        batch=0,
        task="t",
        environment="maths",
        size=8,
        samples=((3, 1),),
        timeout_s=120.0,
        hard_cap_s=150.0,
        resumes=2,
    )
    again = options.attempt_options(group, AttemptIn(run="r1", group=7, sample=3, attempt=1))
    first = options.attempt_options(group, AttemptIn(run="r1", group=7, sample=3, attempt=0))
    assert (again["activity_id"], again["summary"]) == ("s3.a1", "sample 3 · attempt 1")
    assert again["task_queue"] == "rollout-maths"
    assert again["priority"] == options.RESUBMITTED
    assert first["priority"] == options.FRESH
    whole = again["schedule_to_close_timeout"]
    assert whole == timedelta(seconds=120) + options.LAST_WORDS
    assert again["start_to_close_timeout"].total_seconds() == 150  # type: ignore[union-attr]
    assert again["retry_policy"].maximum_attempts == 3  # type: ignore[union-attr]
    assert "schedule_to_start_timeout" not in again
