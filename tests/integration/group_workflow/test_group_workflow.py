"""A group runs its samples, replaces those that fail, and ends once."""

import asyncio

import pytest
from temporalio.client import WorkflowFailureError

from activities import namespace
from domain.messages import (
    AttemptFailure,
    CancelSample,
    GroupOut,
    LiveAttempt,
)
from tests.group_theatre import (
    Open,
    Play,
    Theatre,
    come_too_late,
    fail,
    fall_silent,
    run_until_cancelled,
    unscored,
)
from tests.recording import keep
from workflows.group import GroupWorkflow


async def test_a_group_of_eight_completes(house: Open) -> None:
    theatre = Theatre(size=8)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out == GroupOut(state="complete", members=8)
        assert [(f.outcome, f.part) for f in theatre.finished] == [("complete", 0)]
        await keep(handle, "complete")
        described = await handle.describe()
        assert described.typed_search_attributes[namespace.STAGE] == "complete"


async def test_spares_that_are_not_needed_are_cancelled_as_surplus(house: Open) -> None:
    theatre = Theatre(size=8, script={(s, 0): run_until_cancelled for s in (3, 9)})
    async with house(theatre) as run:
        handle = await run.start(oversample=2)
        out = await handle.result()
        assert (out.state, out.members) == ("complete", 8)
        assert sorted(theatre.stopped) == [(3, 0), (9, 0)]
        assert theatre.closed == []
        await keep(handle, "oversample")


async def test_a_failure_is_resubmitted_under_the_number_the_ledger_gives(house: Open) -> None:
    theatre = Theatre(size=2, script={(1, 0): fail(AttemptFailure.INFRA_ERROR), (1, 1): unscored})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out.resubmitted == {"infra_error": 1, "unscored": 1}
        assert [(c.attempt, c.cause, c.status, c.lost) for c in theatre.closed] == [
            (0, "infra_error", "infra_error", False),
            (1, "unscored", "truncated", False),
        ]
        attributes = (await handle.describe()).typed_search_attributes
        assert attributes[namespace.RESUBMISSIONS] == 2
        assert list(attributes[namespace.CAUSES]) == ["infra_error", "unscored"]
        await keep(handle, "resubmitted")


async def test_a_failed_sample_that_a_spare_replaces_is_given_up(house: Open) -> None:
    theatre = Theatre(size=2, spares=1, script={(0, 0): fail(AttemptFailure.CANCELLED)})
    async with house(theatre) as run:
        handle = await run.start(oversample=1)
        out = await handle.result()
        assert (out.state, out.members, out.resubmitted) == ("complete", 2, {})
        await keep(handle, "given_up")


async def test_a_result_that_has_no_place_has_no_successor(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): run_until_cancelled, (1, 0): come_too_late})
    async with house(theatre) as run:
        handle = await run.start(oversample=1)
        async with asyncio.timeout(20):
            while (await handle.query(GroupWorkflow.state)).live != (
                LiveAttempt(sample=0, attempt=0),
            ):
                pass  # each query is a round trip
        await handle.signal(
            GroupWorkflow.cancel_sample, CancelSample(sample=0, attempt=0, cause="stale")
        )
        out = await handle.result()
        assert (out.members, out.resubmitted) == (1, {"stale": 1})
        assert (1, 1) not in theatre.started
        await keep(handle, "too_late")


async def test_what_the_ledger_refuses_fails_the_workflow_in_sight(house: Open) -> None:
    script = {(0, 0): fail(AttemptFailure.INFRA_ERROR), (1, 0): run_until_cancelled}
    theatre = Theatre(size=2, script=script, refusing=True)
    async with house(theatre) as run:
        handle = await run.start()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert theatre.finished == []
        assert theatre.stopped == [(1, 0)]
        await keep(handle, "refused")


async def test_a_surplus_signal_ends_a_sample_that_has_no_successor(house: Open) -> None:
    theatre = Theatre(size=1, script={(s, 0): run_until_cancelled for s in (0, 1)})
    async with house(theatre) as run:
        handle = await run.start(oversample=1)
        await theatre.until_started((0, 0), (1, 0))
        surplus = CancelSample(sample=1, attempt=0, cause="surplus")
        await handle.signal(GroupWorkflow.cancel_sample, surplus)
        await theatre.until(lambda: (1, 0) in theatre.stopped)
        stale = CancelSample(sample=0, attempt=0, cause="stale")
        await handle.signal(GroupWorkflow.cancel_sample, stale)
        out = await handle.result()
        assert (out.members, out.resubmitted) == (1, {"stale": 1})
        assert sorted(theatre.started) == [(0, 0), (0, 1), (1, 0)]
        await keep(handle, "surplus")


async def test_an_attempt_that_joined_before_it_was_given_up_is_not_tried_again(
    house: Open,
) -> None:
    theatre = Theatre(size=1, script={(0, 0): fail(AttemptFailure.LOST)}, joined=True)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.state, out.members, out.resubmitted) == ("complete", 1, {})
        assert theatre.started == [(0, 0)]
        await keep(handle, "joined")


async def test_a_sample_that_keeps_failing_abandons_the_group(house: Open) -> None:
    script: dict[tuple[int, int], Play] = {(0, n): fail(AttemptFailure.INFRA_ERROR) for n in (0, 1)}
    theatre = Theatre(size=2, max_attempts=2, script={**script, (1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.state, out.cause) == ("abandoned", "max_attempts")
        assert theatre.stopped == [(1, 0)]
        await keep(handle, "abandoned")


async def test_a_stale_signal_replaces_one_attempt_and_repeats_change_nothing(house: Open) -> None:
    theatre = Theatre(size=2, script={(0, 0): run_until_cancelled, (1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        for _ in range(3):
            await handle.signal(
                GroupWorkflow.cancel_sample, CancelSample(sample=0, attempt=0, cause="stale")
            )
        await theatre.until_started((0, 1))
        await handle.signal(  # late: that attempt has been replaced
            GroupWorkflow.cancel_sample, CancelSample(sample=0, attempt=0, cause="stale")
        )
        await handle.signal(
            GroupWorkflow.cancel_sample, CancelSample(sample=1, attempt=0, cause="resident_limit")
        )
        out = await handle.result()
        assert out.resubmitted == {"stale": 1, "cancelled": 1}
        assert sorted(theatre.started) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        await keep(handle, "stale")


async def test_a_timeout_counts_from_submission_and_is_resubmitted(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start(timeout_s=1.0)
        out = await handle.result()
        assert out.resubmitted == {"timeout": 1}
        assert [(c.cause, c.status, c.lost) for c in theatre.closed] == [
            ("timeout", "cancelled", False)
        ]
        await keep(handle, "timeout")


async def test_a_silent_worker_is_a_loss(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): fall_silent})
    async with house(theatre) as run:
        handle = await run.start(heartbeat_s=1.0)
        out = await handle.result()
        assert out.members == 1
        assert [(c.cause, c.status, c.lost) for c in theatre.closed] == [
            ("infra_error", "infra_error", True)
        ]
        await keep(handle, "lost")


@pytest.mark.parametrize("kind", [AttemptFailure.LOST, AttemptFailure.WORKER_SHUTDOWN])
async def test_what_the_platform_took_is_no_failure(house: Open, kind: str) -> None:
    theatre = Theatre(size=1, max_attempts=1, script={(0, 0): fail(kind, retryable=True)})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.state, out.resubmitted) == ("complete", {"infra_error": 1})
        assert theatre.closed[0].lost
        await keep(handle, "taken")


async def test_a_fenced_attempt_adopts_the_result_of_its_owner(house: Open) -> None:
    theatre = Theatre(size=1, script={(0, 0): fail(AttemptFailure.FENCED)})
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.state, out.members, theatre.closed) == ("complete", 1, [])
        await keep(handle, "adopted")


async def test_a_broken_source_ends_the_group_with_its_message(house: Open) -> None:
    script = {(0, 0): fail(AttemptFailure.SOURCE_BROKEN), (1, 0): run_until_cancelled}
    theatre = Theatre(size=2, script=script)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert out.cause == "it broke"
        assert [(f.outcome, f.cause) for f in theatre.finished] == [("source_broken", "it broke")]
        assert theatre.stopped == [(1, 0)]
        await keep(handle, "source_broken")
