"""Whatever ends a group, its attempts are drained and it is settled exactly once."""

import asyncio

import psycopg
import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from domain.messages import (
    AttemptIn,
    AttemptRef,
    Close,
    Stuck,
    StuckAttempt,
)
from tests.current_details import readable
from tests.group_theatre import (
    Open,
    Theatre,
    clean_up_slowly,
    run_until_cancelled,
)
from tests.recording import keep
from workflows.group import GroupWorkflow


async def test_a_close_signal_stops_all_and_the_first_cause_counts(house: Open) -> None:
    theatre = Theatre(size=3, script={(s, 0): run_until_cancelled for s in range(3)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0), (2, 0))
        for cause in ("close", "surplus", "close"):
            await handle.signal(GroupWorkflow.close_group, Close(cause=cause))
        out = await handle.result()
        assert (out.state, out.cause) == ("cancelled", "close")
        assert sorted(theatre.stopped) == [(0, 0), (1, 0), (2, 0)]
        assert len(theatre.finished) == 1
        await keep(handle, "closed")


async def test_a_native_cancel_drains_and_still_finishes(house: Open) -> None:
    theatre = Theatre(size=2, script={(s, 0): run_until_cancelled for s in range(2)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        await handle.cancel()
        with pytest.raises(WorkflowFailureError) as failure:
            await handle.result()
        assert isinstance(failure.value.cause, CancelledError)
        assert [(f.outcome, f.cause) for f in theatre.finished] == [("cancelled", "human")]
        assert sorted(theatre.stopped) == [(0, 0), (1, 0)]
        await keep(handle, "cancelled")


async def test_a_second_cancel_during_the_drain_does_not_cut_it_short(house: Open) -> None:
    theatre = Theatre(size=2, script={(s, 0): clean_up_slowly for s in range(2)})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        await theatre.until(lambda: len(theatre.stopped) == 2)
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert len(theatre.finished) == 1
        assert (0, 100) in theatre.stopped
        assert (1, 100) in theatre.stopped
        await keep(handle, "cancel_in_drain")


async def test_a_cancel_while_the_ledger_settles_the_group_does_not_undo_it(house: Open) -> None:
    """The server refuses to complete a workflow that has news, so the local step may run again."""
    theatre = Theatre(size=1)
    async with house(theatre) as run:

        async def cancel_meanwhile() -> None:
            await handle.cancel()
            await asyncio.sleep(1.0)

        theatre.before_finish = cancel_meanwhile
        theatre.script[0, 0] = run_until_cancelled
        handle = await run.start()
        await theatre.until_started((0, 0))
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert theatre.finished[0].cause == "close"
        assert theatre.stopped == [(0, 0)]
        await keep(handle, "cancel_in_finish")


async def test_a_cancel_before_the_first_task_still_finishes(client: Client, house: Open) -> None:
    theatre = Theatre(size=2)
    opening = house(theatre)
    handle = await opening.house.start()
    await handle.cancel()
    async with opening:
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert [f.outcome for f in theatre.finished] == ["cancelled"]
    assert theatre.started == []
    await keep(handle, "cancel_at_once")


async def test_at_the_deadline_finished_members_train_and_the_tails_go_on(house: Open) -> None:
    release = asyncio.Event()

    async def tail(theatre: Theatre, which: AttemptIn) -> AttemptRef:
        while not release.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.05)
        return theatre.join(which)

    theatre = Theatre(size=4, script={(2, 0): tail, (3, 0): tail})
    async with house(theatre) as run:
        handle = await run.start(completion="deadline", min_members=2, on_stragglers="carry_over")
        await theatre.until_started((2, 0), (3, 0))
        for _ in range(2):
            await handle.signal(GroupWorkflow.deadline_reached)
        await theatre.until(lambda: bool(theatre.finished))
        release.set()
        out = await handle.result()
        assert [(f.outcome, f.part) for f in theatre.finished] == [("complete", 0), ("complete", 1)]
        assert (out.state, out.members) == ("complete", 4)
        await keep(handle, "carry_over")


async def test_a_deadline_signal_alone_does_not_end_a_group_that_truncates(house: Open) -> None:
    theatre = Theatre(size=2)
    async with house(theatre) as run:

        async def signalled(theatre: Theatre, which: AttemptIn) -> AttemptRef:
            await handle.signal(GroupWorkflow.deadline_reached)
            return theatre.join(which)

        theatre.script[1, 0] = signalled
        handle = await run.start(completion="deadline", min_members=1, on_stragglers="truncate")
        out = await handle.result()
        assert (out.members, len(theatre.finished)) == (2, 1)
        await keep(handle, "quorum")


async def test_a_lost_workflow_of_tails_finishes_as_part_one(house: Open) -> None:
    theatre = Theatre(size=2, kept=1)
    async with house(theatre) as run:
        handle = await run.start(on_stragglers="carry_over", part0_admitted=True)
        await handle.signal(GroupWorkflow.deadline_reached)
        await handle.result()
        assert [f.part for f in theatre.finished] == [1]


async def test_kept_members_count_and_only_the_missing_sample_runs(house: Open) -> None:
    theatre = Theatre(size=4, kept=3)
    async with house(theatre) as run:
        handle = await run.start()
        out = await handle.result()
        assert (out.members, theatre.started) == (4, [(0, 0)])
        await keep(handle, "reopened")


async def test_while_the_ledger_is_away_groups_wait_and_still_hear_signals(house: Open) -> None:
    theatre = Theatre(size=1)
    back = asyncio.Event()

    async def away() -> None:
        if not back.is_set():
            raise psycopg.OperationalError("the server closed the connection unexpectedly")

    theatre.before_finish = away
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0))
        async with asyncio.timeout(30):
            while (await handle.query(GroupWorkflow.state)).live:
                pass  # each query is a round trip
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        back.set()
        out = await handle.result()
        # The step is delivered at least once; the first to arrive settles the group.
        assert (out.state, theatre.finished[0].outcome) == ("complete", "complete")


async def test_a_claimed_generation_is_refused(house: Open) -> None:
    theatre = Theatre(size=1, owned=True)
    async with house(theatre) as run:
        handle = await run.start()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert theatre.started == []
        assert theatre.finished == []
        await keep(handle, "owned")


async def test_people_see_each_sample_and_the_sweep_sees_what_is_live(house: Open) -> None:
    theatre = Theatre(size=2, script={(1, 0): run_until_cancelled})
    async with house(theatre) as run:
        handle = await run.start()
        await theatre.until_started((0, 0), (1, 0))
        async with asyncio.timeout(20):
            while (state := await handle.query(GroupWorkflow.state)).members < 1:
                pass  # each query is a round trip
        assert [(a.sample, a.attempt) for a in state.live] == [(1, 0)]
        details = await handle.query("__temporal_workflow_metadata")
        assert "| s0.a0 | completed, reward 1 | " in readable(details)
        described = await handle.describe()
        assert described.raw_description.pending_activities[0].activity_id == "s1.a0"
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        await handle.result()


async def test_a_stuck_group_says_so_and_goes_back_to_where_it_stands(house: Open) -> None:
    release = asyncio.Event()

    async def released(theatre: Theatre, which: AttemptIn) -> AttemptRef:
        await release.wait()
        return theatre.join(which)

    theatre = Theatre(size=3, script={(0, 0): released, (1, 0): run_until_cancelled})
    theatre.script[2, 0] = run_until_cancelled
    async with house(theatre) as run:
        handle = await run.start(completion="deadline", min_members=1)
        await theatre.until_started((0, 0), (1, 0), (2, 0))
        seen = [
            StuckAttempt(
                sample=sample, attempt=attempt, waits_on="engine", why="none", since="12:00"
            )
            for sample, attempt in ((1, 0), (2, 7), (9, 0))  # the last two are not live
        ]
        await handle.signal(GroupWorkflow.stuck, Stuck(attempts=tuple(seen)))
        assert (await handle.query(GroupWorkflow.state)).stage == "stuck"
        told = readable(await handle.query("__temporal_workflow_metadata"))
        assert "| s1.a0 | stuck | " in told
        assert "| s2.a0 | running | " in told
        release.set()
        async with asyncio.timeout(20):
            while (state := await handle.query(GroupWorkflow.state)).members < 1:
                pass  # each query is a round trip
        assert state.stage == "stuck"
        await handle.signal(GroupWorkflow.stuck, Stuck())
        assert (await handle.query(GroupWorkflow.state)).stage == "quorum"
        await handle.signal(GroupWorkflow.close_group, Close(cause="close"))
        await handle.result()
        await keep(handle, "stuck")
