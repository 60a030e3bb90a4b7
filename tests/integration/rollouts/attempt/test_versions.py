"""Which version a request is sampled by, and what is written of it."""

import asyncio
from typing import Any

from activities.inference import EngineClient
from domain.environments import Outcome, Recorder
from domain.rollouts import Status, Task
from storage import segments
from tests.attempted import (
    SEGMENT,
    Make,
    Session,
    Worker,
    failure,
    until,
    with_engines,
)
from tests.stub_engine import StubEngine


async def test_under_the_segment_policy_requests_follow_the_served_version(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(
        sampling={"policy": "segment", "kv_cache": {"max_staleness": 1}},
        schedule={"order": "deadline", "stale_policy": "resubmit", "max_lag": 4},
    )

    async def run(task: Task, recorder: Recorder) -> Outcome:
        ids = [5]
        for version in (1, 2):
            ids += (await recorder.sample(ids)).sampled_ids
            await asyncio.to_thread(b.serve, version)
            await asyncio.to_thread(with_engines, b, engine.url, version=version)
            await asyncio.sleep(1.1)  # longer than the router believes the ledger's last answer
        await recorder.sample(ids)
        return Outcome(Status.COMPLETED, reward=1.0)

    engine.kv_version = lambda version: 0
    with_engines(b, engine.url)
    group = b.group()
    ref = await Worker(b, client, Session(run)).play(b.key(group, 0))
    assert ref.member
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert [(s.version, s.kv_version) for s in read] == [(0, 0), (1, 0), (1, 0)]
    assert [r.get("kv_max_staleness", 0) for r in engine.requests] == [0, 1, 1]
    row = b.attempt(group, 0)
    assert (row["oldest_version"], row["newest_version"]) == (0, 1)


async def test_an_engine_without_kv_provenance_fails_the_attempt(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(
        sampling={"policy": "segment", "kv_cache": {"max_staleness": 1}},
        schedule={"order": "deadline", "stale_policy": "resubmit", "max_lag": 4},
    )

    async def run(task: Task, recorder: Recorder) -> Outcome:
        ids = [5, *(await recorder.sample([5])).sampled_ids]
        await asyncio.to_thread(b.serve, 1)
        await asyncio.to_thread(with_engines, b, engine.url, version=1)
        await asyncio.sleep(1.1)
        await recorder.sample(ids)
        return Outcome(Status.COMPLETED, reward=1.0)

    engine.kv_version = lambda version: None
    with_engines(b, engine.url)
    group = b.group()
    kind, message, _ = await failure(Worker(b, client, Session(run)).play(b.key(group, 0)))
    assert kind == "INFRA_ERROR"
    assert "does not say which version's KV" in message


async def test_a_swap_under_a_request_keeps_each_spans_version(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(**SEGMENT)

    async def run(task: Task, recorder: Recorder) -> Outcome:
        await recorder.sample([5])
        return Outcome(Status.COMPLETED, reward=1.0)

    engine.tokens = 5
    engine.spans = lambda version, number: [(version, 2), (version + 1, number)]
    with_engines(b, engine.url)
    b.serve(1, trained=True)
    b.sql("UPDATE policy_versions SET state = 'draining' WHERE run_id = %s AND version = 1", b.run)
    group = b.group()
    ref = await Worker(b, client, Session(run)).play(b.key(group, 0))
    assert ref.member
    (read,) = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert (read.version, read.spans, read.kv_version) == (0, ((0, 2), (1, 3)), 0)
    row = b.attempt(group, 0)
    assert (row["oldest_version"], row["newest_version"], row["kv_version"]) == (0, 1, 0)


async def test_under_trajectory_no_stored_rollout_has_two_versions(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()

    async def run(task: Task, recorder: Recorder) -> Outcome:
        ids = [5, *(await recorder.sample([5])).sampled_ids]
        await asyncio.to_thread(b.serve, 1)  # the push lands between two turns
        await asyncio.to_thread(with_engines, b, engine.url, version=1)
        engine.spans = spans[task.data["n"]]
        await recorder.sample(ids)
        return Outcome(Status.COMPLETED, reward=1.0)

    def honest(version: int, number: int) -> list[tuple[int, int]]:
        return [(version, number)]

    spans: dict[Any, Any] = {1: honest}
    with_engines(b, engine.url)
    group = b.group()
    await Worker(b, client, Session(run)).play(b.key(group, 0))
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert [s.spans for s in read] == [((0, 3),), ((0, 3),)]
    engine.spans = lambda version, number: [(version, 1), (version + 1, number)]
    kind, message, _ = await failure(Worker(b, client, Session(run)).play(b.key(group, 1)))
    assert kind == "INFRA_ERROR"
    assert "sampled" in message
    assert b.ledger.call(segments.read, b.run, group, 1, 0) == []


async def test_a_call_that_began_before_a_push_is_of_the_older_version(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make(**SEGMENT)

    async def run(task: Task, recorder: Recorder) -> Outcome:
        await recorder.sample([5])
        return Outcome(Status.COMPLETED, reward=1.0)

    engine.hold = asyncio.Event()
    with_engines(b, engine.url)
    group = b.group()
    playing = asyncio.create_task(Worker(b, client, Session(run)).play(b.key(group, 0)))
    await until(lambda: engine.running)
    b.serve(1)
    with_engines(b, engine.url, version=1)
    engine.hold.set()
    await playing
    (read,) = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert (read.version, read.spans) == (0, ((0, 3),))
