"""Cancelled, overtaken, killed, drained, out of time: how an attempt ends."""

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.testing import ActivityEnvironment

from activities.inference import EngineClient
from domain.environments import Outcome, Recorder
from domain.rollouts import Status, Task
from storage import attempts, segments
from tests.attempted import (
    BY_TEMPORAL,
    Counting,
    Make,
    Session,
    Worker,
    failure,
    limited,
    sample_once,
    until,
    with_engines,
)
from tests.stub_engine import StubEngine

HALF_A_MINUTE = timedelta(seconds=30)


async def test_a_cancel_reaches_the_engine_and_the_partial_output_is_recorded(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    environment = limited(60)
    play = asyncio.create_task(
        Worker(b, client, Session(sample_once)).play(b.key(group, 0), environment)
    )
    await until(lambda: engine.running)
    asked = time.monotonic()
    environment.cancel(BY_TEMPORAL)
    with pytest.raises(asyncio.CancelledError):
        await play
    assert time.monotonic() - asked < 3
    assert engine.running == 0
    assert engine.aborted == [engine.requests[0]["request_id"]]
    (partial,) = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert (partial.finish_reason, partial.sampled_ids.tolist()) == ("abort", [100, 101])
    row = b.attempt(group, 0)
    assert (row["state"], row["status"], row["policy_tokens"]) == ("finished", "cancelled", 2)


async def test_a_rollout_that_is_out_of_time_stops_by_itself_with_its_partial_output(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(groups={"size": 4, "timeout": 31.0})
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    waited = limited(60)
    waited.info = replace(waited.info, scheduled_time=waited.info.started_time - HALF_A_MINUTE)
    began = time.monotonic()
    kind, _, final = await failure(
        Worker(b, client, Session(sample_once)).play(b.key(group, 0), waited)
    )
    assert (kind, final) == ("TIMED_OUT", True)
    assert 0.9 < time.monotonic() - began < 20  # the time in which it waited for a slot counts
    assert engine.running == 0
    (partial,) = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert (partial.finish_reason, partial.sampled_ids.tolist()) == ("abort", [100, 101])
    row = b.attempt(group, 0)
    assert (row["status"], row["cancel_cause"], row["surplus"]) == ("cancelled", "timeout", False)
    assert b.fail(group, 0, "cancelled").cause == "timeout"
    assert b.attempt(group, 0)["counts_as_failure"]


@pytest.mark.parametrize(
    "details",
    [
        ActivityCancellationDetails(worker_shutdown=True),
        ActivityCancellationDetails(timed_out=True),
        ActivityCancellationDetails(not_found=True),
        ActivityCancellationDetails(reset=True),
    ],
)
async def test_what_is_no_request_to_cancel_writes_no_final_status(
    make: Make, engine: StubEngine, client: EngineClient, details: ActivityCancellationDetails
) -> None:
    b = make()
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    environment = limited(60)
    play = asyncio.create_task(
        Worker(b, client, Session(sample_once)).play(b.key(group, 0), environment)
    )
    await until(lambda: engine.running)
    environment.cancel(details)
    if details.worker_shutdown:
        kind, _, final = await failure(play)
        assert (kind, final) == ("WORKER_SHUTDOWN", False)
    else:
        with pytest.raises(asyncio.CancelledError):
            await play
    assert b.attempt(group, 0)["state"] == "running"
    assert b.attempt(group, 0)["policy_tokens"] == 2


async def test_a_cancel_in_the_ledger_stops_at_the_next_segment_whatever_the_source_catches(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    async def stubborn(task: Task, recorder: Recorder) -> Outcome:
        while True:
            with contextlib.suppress(BaseException):
                await recorder.sample([5])
            await asyncio.sleep(0)

    b = make()
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    attempts = Worker(b, client, Session(sample_once))
    play = asyncio.create_task(attempts.play(b.key(group, 0)))
    await until(lambda: engine.running)
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    engine.hold.set()
    kind, message, _ = await failure(play)
    assert (kind, message) == ("CANCELLED", "stale")
    assert b.attempt(group, 0)["policy_tokens"] == 3
    assert b.fail(group, 0, "cancelled").cause == "stale"


async def test_an_execution_that_was_overtaken_stops_and_is_counted(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    play = asyncio.create_task(Worker(b, client, Session(sample_once)).play(b.key(group, 0)))
    await until(lambda: engine.running)
    b.start(group, 0)
    engine.hold.set()
    kind, _, final = await failure(play)
    assert (kind, final) == ("FENCED", True)
    row = b.attempt(group, 0)
    assert (row["state"], row["policy_tokens"]) == ("running", 0)
    late = b.sql("SELECT 1 FROM events WHERE run_id = %s AND kind = 'late_result'", b.run)
    assert len(late) == 1


async def test_an_execution_that_comes_late_to_its_start_leaves_its_successor_alone(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    with_engines(b, engine.url)
    group = b.group()
    later = ActivityEnvironment.default_info().current_attempt_scheduled_time + HALF_A_MINUTE
    successor = b.ledger.call(attempts.start, b.key(group, 0), worker="w", scheduled_at=later)
    worker = Worker(b, client, Session(sample_once))
    kind, _, final = await failure(asyncio.create_task(worker.play(b.key(group, 0))))
    assert (kind, final) == ("FENCED", True)
    row = b.attempt(group, 0)
    assert (row["fence"], row["worker"], row["state"]) == (successor.fence, "w", "running")


@pytest.mark.parametrize(
    ("recovery", "calls"),
    [
        ("stateless", ["reset", "turn3"]),
        ("snapshot", ["restore2", "turn3"]),
    ],
)
async def test_an_attempt_goes_on_after_its_worker_died(
    make: Make, engine: StubEngine, client: EngineClient, recovery: str, calls: list[str]
) -> None:
    b = make()
    with_engines(b, engine.url)
    group = b.group()
    first = Counting(recovery)
    engine.hold, engine.hold_from = (hold := asyncio.Event()), 2
    play = asyncio.create_task(Worker(b, client, first).play(b.key(group, 0)))
    await until(lambda: engine.running)
    # The process dies: nothing more is written, no request is answered.
    committed = b.attempt(group, 0)["turns"]
    second = Counting(recovery)
    engine.hold = None
    ref = await Worker(b, client, second).play(b.key(group, 0))
    assert (ref.status, ref.reward, ref.turns) == ("completed", 3.0, 3)
    assert second.calls == calls
    assert committed == 2
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert len(read) == 3
    hold.set()
    assert (await failure(play))[0] == "FENCED"
    assert b.attempt(group, 0)["policy_tokens"] == sum(len(s.sampled_ids) for s in read)


async def test_a_dropped_rollout_whose_worker_died_is_lost(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    with_engines(b, engine.url)
    group = b.group()
    b.start(group, 0)
    worker = Worker(b, client, Counting("drop"))
    b.sampled(group, 0)
    kind, message, final = await failure(worker.play(b.key(group, 0)))
    assert (kind, final) == ("LOST", True)
    assert "drop" in message
    assert b.attempt(group, 0)["status"] is None
    assert b.fail(group, 0, lost=True).next_attempt == 1
    row = b.attempt(group, 0)
    assert (row["state"], row["counts_as_failure"]) == ("lost", False)


async def test_a_worker_that_drains_hands_on_between_segments(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    environment = limited(60)
    play = asyncio.create_task(
        Worker(b, client, Counting("stateless")).play(b.key(group, 0), environment)
    )
    await until(lambda: engine.running)
    environment.worker_shutdown()
    engine.hold.set()
    kind, _, final = await failure(play)
    assert (kind, final) == ("WORKER_SHUTDOWN", False)
    assert b.attempt(group, 0)["turns"] == 1
    assert b.attempt(group, 0)["state"] == "running"


async def test_truncation_at_the_groups_deadline(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(
        groups={
            "size": 2,
            "completion": {
                "mode": "deadline",
                "min_members": 1,
                "max_straggler_tokens": 3,
                "on_stragglers": "truncate",
            },
        },
        schedule={"order": "deadline", "stale_policy": "mask_span", "allow_trajectory_loss": True},
    )
    with_engines(b, engine.url)
    group = b.group()
    b.rollout(group, 1)
    ref = await Worker(b, client, Counting("drop")).play(b.key(group, 0))
    assert (ref.status, ref.cause, ref.member, ref.tokens) == (
        "truncated",
        "group_deadline",
        True,
        3,
    )


async def test_a_source_that_ignores_its_cancellation_is_abandoned_named_and_holds_no_slot(
    make: Make,
    engine: StubEngine,
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("activities.attempt.ABANDON_S", 0.2)
    over = asyncio.Event()

    async def deaf(task: Task, recorder: Recorder) -> Outcome:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        return Outcome(Status.COMPLETED, reward=1.0)

    b = make(groups={"size": 4, "timeout": 0.3})
    with_engines(b, engine.url)
    group = b.group()
    attempts = Worker(b, client, Session(deaf)).attempts()
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "activities.attempt"):
        for sample in (0, 1):  # the second finds the first one still there
            kind, _, final = await failure(
                limited(60).run(attempts.run_attempt, b.key(group, sample))
            )
            assert (kind, final) == ("TIMED_OUT", True)
    assert time.monotonic() - began < 20
    first, second = (record.getMessage() for record in caplog.records)
    assert f"sample 0 of group {group} ignored its cancellation" in first
    assert "1 such tasks run in this worker" in first
    assert f"sample 1 of group {group}" in second
    assert "2 such tasks" in second
    row = b.attempt(group, 0)
    assert (row["status"], row["cancel_cause"], row["reward"]) == ("cancelled", "timeout", None)
    over.set()
    await until(lambda: not attempts._abandoned)
    assert b.members(group) == []  # what it returned in the end is nobody's
