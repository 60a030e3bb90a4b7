"""Engines that fail, and sources that do what they should not."""

import time

import pytest

from activities.inference import EngineClient
from storage import segments
from tests.attempted import (
    Make,
    Run,
    Session,
    Worker,
    boom,
    broken,
    failure,
    gives_up,
    limited,
    nan_reward,
    no_reward,
    sample_once,
    with_engines,
)
from tests.stub_engine import StubEngine


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
    b = make(groups={"size": 4, "timeout": 3.0})
    with_engines(b, "http://127.0.0.1:9")
    group = b.group()
    began = time.monotonic()
    play = Worker(b, client, Session(sample_once)).play(b.key(group, 0), limited(60))
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
