"""How often and how long Temporal tries: retry policies, time limits, and the errors that are final."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.workflow import ActivityConfig, LocalActivityConfig

with workflow.unsafe.imports_passed_through():
    from domain import errors
    from domain.ids import attempt_activity_id
    from domain.messages import (
        LEDGER_QUEUE,
        AttemptFailure,
        AttemptIn,
        EngineRef,
        GroupIn,
        rollout_queue,
    )


def _descendants(error: type[Exception]) -> set[type[Exception]]:
    return {error}.union(*(_descendants(child) for child in error.__subclasses__()))


TRANSIENT = {errors.EngineUnavailable, errors.EngineBusy}
"""Errors that another try may not meet."""

FINAL = sorted(
    {error.__name__ for error in _descendants(errors.RollbookError) - TRANSIENT}
    | {failure.value for failure in AttemptFailure if failure != AttemptFailure.WORKER_SHUTDOWN}
)
"""Error types that are never retried. Temporal matches exact names, so every subclass is named."""

LEDGER_STEP = LocalActivityConfig(
    # Longer than a Postgres may be silent (30 s), so that what ends the step says why.
    start_to_close_timeout=timedelta(seconds=40),
    # A Postgres outage stalls groups, it never fails them.
    retry_policy=RetryPolicy(
        initial_interval=timedelta(milliseconds=200),
        maximum_interval=timedelta(seconds=30),
        non_retryable_error_types=FINAL,
    ),
    # Longer back-offs are timers of the workflow: they hold no workflow task, so signals get through.
    local_retry_threshold=timedelta(seconds=2),
)
"""A transaction of a few milliseconds. Local: it costs one history event and no server round trip
(docs/adr/local-ledger-steps.md)."""

LAST_WORDS = timedelta(seconds=5)
"""An attempt whose time is up ends by itself and records what was sampled; Temporal waits so long
before it ends one that cannot, or that never began."""

FRESH, RESUBMITTED = Priority(priority_key=3), Priority(priority_key=1)
"""A replacement is what its group waits for, so it goes first."""


def attempt_options(group: GroupIn, which: AttemptIn) -> ActivityConfig:
    """Where and how long one attempt runs.

    Temporal's own retries only resume it; a resubmission is a new attempt with an id of its own.
    """
    return ActivityConfig(
        task_queue=rollout_queue(group.environment),
        activity_id=attempt_activity_id(which.sample, which.attempt),
        summary=f"sample {which.sample} · attempt {which.attempt}",
        priority=RESUBMITTED if which.attempt else FRESH,
        schedule_to_close_timeout=None
        if group.timeout_s is None
        else timedelta(seconds=group.timeout_s) + LAST_WORDS,
        start_to_close_timeout=timedelta(seconds=group.hard_cap_s),
        heartbeat_timeout=timedelta(seconds=group.heartbeat_s),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(seconds=1),
            maximum_interval=timedelta(seconds=30),
            maximum_attempts=1 + group.resumes,
            non_retryable_error_types=FINAL,
        ),
        # The ledger row must be final and the engine free before the group closes.
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )


def load_options(engine: EngineRef) -> ActivityConfig:
    """How long one engine may take to fetch, check and acknowledge one version."""
    return ActivityConfig(
        task_queue=LEDGER_QUEUE,
        summary=f"{engine.engine} · incarnation {engine.incarnation}",
        start_to_close_timeout=timedelta(minutes=15),
        heartbeat_timeout=timedelta(seconds=10),
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=500),
            maximum_interval=timedelta(seconds=10),
            non_retryable_error_types=FINAL,
        ),
        # A load that is no longer waited for may finish by itself.
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
    )
