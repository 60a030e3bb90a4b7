"""An attempt commits what it samples, token by token, and beats while it waits."""

import asyncio
from typing import Any

from activities.inference import EngineClient
from domain.environments import Outcome, Recorder
from domain.messages import AttemptRef
from domain.rollouts import Status, Task
from storage import segments
from tests.attempted import (
    SLOW_S,
    Make,
    Session,
    Slow,
    Worker,
    limited,
    with_engines,
)
from tests.stub_engine import StubEngine


async def test_a_session_is_recorded_token_by_token(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        first = await recorder.sample([5, 6])
        assert recorder.version == 0
        ids = [5, 6, *first.sampled_ids, 9]
        await recorder.sample(ids, max_tokens=2)
        await recorder.sample([1])
        await beaten.wait()
        return Outcome(Status.COMPLETED, reward=0.5, metrics={"calls": 2.0})

    b = make()
    with_engines(b, engine.url)
    group = b.group()
    beats: list[Any] = []
    beaten = asyncio.Event()

    def on_heartbeat(*details: Any) -> None:
        beats.append(details[0])
        beaten.set()

    environment = limited(60)
    environment.on_heartbeat = on_heartbeat
    ref = await Worker(b, client, Session(run)).play(b.key(group, 0), environment)
    assert ref == AttemptRef(
        sample=0,
        attempt=0,
        status="completed",
        member=True,
        reward=0.5,
        tokens=8,
        turns=3,
        version=0,
    )
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert [s.prompt_ids.tolist() for s in read] == [[5, 6], [5, 6, 100, 101, 2, 9], [1]]
    assert [s.sampled_ids.tolist() for s in read] == [[100, 101, 2], [100, 2], [100, 101, 2]]
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [(p.turn, p.chain, p.context_start) for p in places] == [(0, 0, 0), (1, 0, 5), (2, 1, 0)]
    assert b.attempt(group, 0)["chain_lengths"] == [8, 4]
    assert {"turn", "seg", "tok", "v", "phase", "engine"} <= set(beats[0])
    seeds = [r["sampling_params"]["seed"] for r in engine.requests]
    assert len(set(seeds)) == 3
    assert {r["cache_salt"] for r in engine.requests} == {f"{b.run}@0"}
    assert len({r["request_id"] for r in engine.requests}) == 3


async def test_it_beats_while_an_engine_a_tool_or_a_verifier_takes_its_time(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.delay_s = SLOW_S
    with_engines(b, engine.url)
    group = b.group()
    beats: list[dict[str, Any]] = []
    environment = limited(60)
    environment.on_heartbeat = lambda *details: beats.append(details[0])
    ref = await Worker(b, client, Slow()).play(b.key(group, 0), environment)
    assert ref.member
    for phase, tokens in (("sampling", 0), ("environment", 3), ("verifier", 3)):
        told = [beat for beat in beats if beat["phase"] == phase]
        assert len(told) >= int(SLOW_S), (phase, beats)  # one a second, on any machine
        assert {(beat["tok"], beat["v"]) for beat in told} == {(tokens, 0)}
        assert {beat["turn"] for beat in told} == {1}


async def test_a_continuation_is_the_same_turn(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        part = await recorder.sample([5], max_tokens=4)
        ids = [5, *part.sampled_ids]
        engine.tokens = 2
        await recorder.sample(ids, max_tokens=4)
        return Outcome(Status.COMPLETED, reward=1.0)

    b = make()
    engine.tokens = None
    with_engines(b, engine.url)
    group = b.group()
    ref = await Worker(b, client, Session(run)).play(b.key(group, 0))
    assert (ref.turns, ref.tokens) == (1, 6)


async def test_requests_side_by_side_are_chains_of_their_own(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        await asyncio.gather(*(recorder.sample([n, n]) for n in range(10, 18)))
        return Outcome(Status.COMPLETED, reward=1.0)

    b = make()
    with_engines(b, engine.url)
    group = b.group()
    ref = await Worker(b, client, Session(run)).play(b.key(group, 0))
    assert ref.tokens == 24
    assert b.attempt(group, 0)["chain_lengths"] == [5] * 8
