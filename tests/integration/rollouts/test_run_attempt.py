"""The attempt activity in Temporal's activity environment, on a real ledger and over real HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from activities.attempt import Attempts
from activities.chat import Chat, PlainChat
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.environments import Env, Outcome, Recorder, RolloutView, Source
from domain.messages import AttemptIn, AttemptRef
from domain.rollouts import Status, Task
from domain.tools import Message
from storage import segments
from tests.stub_engine import STOP, StubEngine, stub_engine

Make = Callable[..., Any]
Run = Callable[[Task, Recorder], Awaitable[Outcome]]

BY_TEMPORAL = ActivityCancellationDetails(cancel_requested=True)


def chat() -> Chat:
    words = {f"w{n}": n for n in range(200)}
    return PlainChat(Tokenizer(WordLevel(words, unk_token="w0")), frozenset({STOP}))


class Session:
    """A SessionSource made of a function."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        return await self._run(task, recorder)


@dataclass
class One:
    """The setups of a worker that knows one run."""

    setup: Setup

    async def get(self, run: str, environment: str) -> Setup:
        return self.setup


def limited(seconds: float) -> ActivityEnvironment:
    environment = ActivityEnvironment()
    now = datetime.now(UTC)
    environment.info = replace(
        environment.info,
        scheduled_time=now,
        started_time=now,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=seconds),
    )
    return environment


@dataclass
class Worker:
    """A worker process's parts, around the bench's run."""

    bench: Any
    engines: EngineClient
    source: Source

    def attempts(self) -> Attempts:
        b = self.bench
        sampler = Sampler(b.ledger, self.engines, Router(b.ledger))
        setups = One(Setup(config=b.config, source=self.source, chat=chat()))
        return Attempts(sampler, setups, worker="w1")  # type: ignore[arg-type]

    async def play(
        self, i: AttemptIn, environment: ActivityEnvironment | None = None
    ) -> AttemptRef:
        environment = environment or limited(60)
        result: AttemptRef = await environment.run(self.attempts().run_attempt, i)
        return result


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with stub_engine() as stub:
        yield stub


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    opened = EngineClient()
    yield opened
    await opened.aclose()


def with_engines(b: Any, *urls: str, version: int = 0) -> None:
    """Register live engines that hold a version."""
    for url in urls:
        b.sql(
            """INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
            VALUES (%s, %s, 1, 4, now() + interval '1 hour') ON CONFLICT DO NOTHING""",
            b.run,
            url,
        )
        b.sql(
            """INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256)
            VALUES (%s, %s, %s, 1, %s)""",
            b.run,
            url,
            version,
            bytes(32),
        )


async def failure(play: Awaitable[Any]) -> tuple[str, str, bool]:
    with pytest.raises(ApplicationError) as caught:
        await play
    return str(caught.value.type), caught.value.message, caught.value.non_retryable


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


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


class Slow(Env):
    """Takes its time in a tool, and computes its verdict in Python without ever waiting."""

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        await asyncio.sleep(SLOW_S)
        return None

    def reward(self, rollout: RolloutView, task: Task) -> float:  # type: ignore[override]
        give_up = time.monotonic() + SLOW_S
        while time.monotonic() < give_up:
            sum(range(10_000))
        return 1.0


SLOW_S = 2.5


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


async def sample_once(task: Task, recorder: Recorder) -> Outcome:
    await recorder.sample([5])
    return Outcome(Status.COMPLETED, reward=1.0)


async def test_failing_engines_are_tried_again_elsewhere(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.failures = 2
    with_engines(b, engine.url, "http://127.0.0.1:9")
    group = b.group()
    ref = await Worker(b, client, Session(sample_once)).play(b.key(group, 0))
    assert ref.member
    assert b.attempt(group, 0)["engine_id"] == engine.url


async def test_engines_that_stay_away_are_an_infra_error_within_the_limit(
    make: Make, client: EngineClient
) -> None:
    b = make()
    with_engines(b, "http://127.0.0.1:9")
    group = b.group()
    began = time.monotonic()
    play = Worker(b, client, Session(sample_once)).play(b.key(group, 0), limited(3.0))
    kind, message, final = await failure(play)
    assert (kind, final) == ("INFRA_ERROR", True)
    assert "EngineUnavailable" in message
    assert time.monotonic() - began < 3.0
    row = b.attempt(group, 0)
    assert (row["status"], row["reward"], row["member"]) == ("infra_error", None, False)


async def test_an_engine_that_restarted_and_holds_nothing_yet_fails_nobody(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.forgotten = 3
    with_engines(b, engine.url)
    group = b.group()
    ref = await Worker(b, client, Session(sample_once)).play(b.key(group, 0), limited(10.0))
    assert ref.member
    assert len(engine.requests) == 4


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refusal_is_not_tried_again_and_carries_the_engines_words(
    make: Make, engine: StubEngine, client: EngineClient, status: int
) -> None:
    b = make()
    engine.status = status
    with_engines(b, engine.url)
    group = b.group()
    kind, message, _ = await failure(Worker(b, client, Session(sample_once)).play(b.key(group, 0)))
    assert kind == "INFRA_ERROR"
    assert "the engine's own words" in message
    assert len(engine.requests) == 1
    assert "own words" in b.attempt(group, 0)["error"]
    assert b.fail(group, 0).next_attempt == 1
    assert b.attempt(group, 0)["counts_as_failure"]


async def test_a_nan_log_probability_is_an_infra_error(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    engine.logprob = float("nan")
    with_engines(b, engine.url)
    group = b.group()
    kind, message, _ = await failure(Worker(b, client, Session(sample_once)).play(b.key(group, 0)))
    assert kind == "INFRA_ERROR"
    assert "nan" in message
    assert b.ledger.call(segments.read, b.run, group, 0, 0) == []


async def boom(task: Task, recorder: Recorder) -> Outcome:
    await recorder.sample([5])
    raise RuntimeError("tool call k")


async def no_reward(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.COMPLETED)


async def nan_reward(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.COMPLETED, reward=float("nan"))


async def gives_up(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.CANCELLED, detail="no sandbox")


async def broken(task: Task, recorder: Recorder) -> Outcome:
    return "done"  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("run", "kind", "words", "status"),
    [
        (boom, "INFRA_ERROR", "Session.run raised RuntimeError: tool call k", "infra_error"),
        (no_reward, "INFRA_ERROR", "Session.run returned no reward", "infra_error"),
        (nan_reward, "INFRA_ERROR", "must be finite", "infra_error"),
        (gives_up, "CANCELLED", "no sandbox", "cancelled"),
        (broken, "SOURCE_BROKEN", "Session.run returned a str", "infra_error"),
    ],
)
async def test_what_the_source_does_wrong_is_named(
    make: Make,
    engine: StubEngine,
    client: EngineClient,
    run: Run,
    kind: str,
    words: str,
    status: str,
) -> None:
    b = make()
    with_engines(b, engine.url)
    group = b.group()
    found, message, final = await failure(Worker(b, client, Session(run)).play(b.key(group, 0)))
    assert (found, final) == (kind, True)
    assert words in message
    row = b.attempt(group, 0)
    assert (row["status"], row["error_type"], row["member"]) == (status, kind, False)
    assert words in row["error"]
    # Asked again, as after a lost answer, it says the same without running anything.
    assert (await failure(Worker(b, client, Session(sample_once)).play(b.key(group, 0))))[0] in (
        kind,
        "INFRA_ERROR",
    )


async def test_a_finish_that_committed_answers_the_retry(
    make: Make, engine: StubEngine, client: EngineClient
) -> None:
    b = make()
    with_engines(b, engine.url)
    group = b.group()
    worker = Worker(b, client, Session(sample_once))
    refs = [await worker.play(b.key(group, 0)) for _ in range(3)]
    assert refs[0] == refs[1] == refs[2]
    assert len(engine.requests) == 1


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


class Counting(Env):
    """Three turns; every hook is counted, so that a resume shows what ran again."""

    def __init__(self, recovery: Any) -> None:
        self.recovery = recovery
        self.calls: list[str] = []
        self.turns_seen: list[int] = []

    async def reset(self, task: Task) -> list[Message]:
        self.calls.append("reset")
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        self.calls.append(f"turn{rollout.turns}")
        return None if rollout.turns == 3 else [{"role": "user", "content": "w6"}]

    async def snapshot(self, rollout: RolloutView) -> Any:
        return {"turns": rollout.turns}

    async def restore(self, rollout: RolloutView, state: Any) -> None:
        self.calls.append(f"restore{state['turns']}")

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return float(rollout.turns)


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


SEGMENT: dict[str, Any] = {
    "sampling": {"policy": "segment", "kv_cache": {"max_staleness": 1}},
    "schedule": {"order": "deadline", "stale_policy": "resubmit", "max_lag": 4},
}


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
