"""Aborts, back-pressure, refusals, loading: the engine's manners, through the one client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from activities.inference import EngineClient, Generated
from domain.errors import EngineRefused, EngineUnavailable, WrongVersion
from engine.weights import weights_digest
from tests.integration.engine.lab import (
    GPT2,
    QWEN3,
    Running,
    Weights,
    idle,
    reach,
    running_engine,
    sampling,
)
from tests.stub_engine import stub_engine
from trainer.model import weights_digest as trainer_digest

LONG = type(QWEN3)(**(QWEN3.to_dict() | {"max_position_embeddings": 100_000}))


@pytest.fixture
async def long(engine: Running, client: EngineClient) -> Running:
    """An engine whose policy `r@1` never stops by itself within a test."""
    await engine.serve(client, "r@1", Weights.random(LONG, 1))
    return engine


def start(
    client: EngineClient, engine: Running, name: str, **extra: Any
) -> "asyncio.Task[Generated]":
    return asyncio.create_task(
        client.generate(
            engine.url,
            "r@1",
            [1, 2, 3],
            sampling(max_tokens=90_000),
            request_id=name,
            salt="s",
            **extra,
        )
    )


async def running(client: EngineClient, engine: Running, count: int) -> None:
    await reach(client, engine.url, lambda health: health.running >= count)


async def tokens(engine: Running, least: int) -> None:
    """Return once that many tokens were generated."""
    async with asyncio.timeout(10), httpx.AsyncClient() as http:
        while True:
            text = (await http.get(engine.url + "/metrics")).text
            line = next(
                x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total")
            )
            if int(line.split()[1]) >= least:
                return


async def test_abort_answers_with_what_was_sampled(long: Running, client: EngineClient) -> None:
    pending = start(client, long, "a")
    await tokens(long, 20)
    await client.abort(long.url, "a")
    async with asyncio.timeout(3):
        partial = await pending
    assert partial.finish_reason == "abort"
    assert len(partial.sampled_ids) == len(partial.logprobs) >= 20
    assert partial.spans == ((1, len(partial.sampled_ids)),)
    await idle(client, long.url)


async def test_a_cancelled_caller_gets_the_partial_answer(
    long: Running, client: EngineClient
) -> None:
    got: list[Generated] = []
    pending = start(client, long, "a", on_partial=got.append)
    await tokens(long, 20)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert len(got) == 1
    assert got[0].finish_reason == "abort"
    assert len(got[0].sampled_ids) >= 20
    await idle(client, long.url)


async def test_fifty_cancelled_callers_leave_nothing_behind(
    long: Running, client: EngineClient
) -> None:
    pending = [start(client, long, f"a{n}") for n in range(50)]
    await running(client, long, 50)
    for task in pending:
        task.cancel()
    await asyncio.wait(pending)
    assert all(task.cancelled() for task in pending)
    await idle(client, long.url, within_s=3.0)


async def test_a_dropped_connection_is_an_abort(long: Running, client: EngineClient) -> None:
    other = EngineClient()
    pending = start(other, long, "a")
    await running(client, long, 1)
    await other.aclose()
    with pytest.raises(EngineUnavailable):
        await pending
    await idle(client, long.url)


async def test_requests_with_one_id_are_separate_and_aborted_together(
    long: Running, client: EngineClient
) -> None:
    pending = [start(client, long, "same") for _ in range(2)]
    await running(client, long, 2)
    await client.abort(long.url, "same")
    answers = await asyncio.gather(*pending)
    assert [a.finish_reason for a in answers] == ["abort", "abort"]


async def test_a_full_queue_is_said_so_and_waiting_requests_can_be_aborted(
    client: EngineClient, tmp_path: Path
) -> None:
    with running_engine(tmp_path, max_batch=2, max_waiting=3) as engine:
        await engine.serve(client, "r@1", Weights.random(LONG, 1))
        pending = [start(client, engine, f"a{n}") for n in range(2)]
        await running(client, engine, 2)
        pending += [start(client, engine, f"a{n}") for n in range(2, 5)]
        full = await reach(client, engine.url, lambda health: health.waiting == 3)
        assert full.running == 2
        with pytest.raises(EngineUnavailable, match=r"429.*5 requests are unanswered"):
            await start(client, engine, "one too many")
        await client.abort(engine.url, "a4")
        assert (await pending[4]).sampled_ids == ()
        for task in pending:
            task.cancel()
        await asyncio.wait(pending)
        await idle(client, engine.url)


async def test_stopping_the_engine_answers_with_partials(
    client: EngineClient, tmp_path: Path
) -> None:
    with running_engine(tmp_path) as engine:
        await engine.serve(client, "r@1", Weights.random(LONG, 1))
        pending = start(client, engine, "a")
        await tokens(engine, 5)
    assert (await pending).finish_reason == "abort"


async def test_a_smaller_priority_number_goes_first(client: EngineClient, tmp_path: Path) -> None:
    with running_engine(tmp_path, max_batch=1) as engine:
        await engine.serve(client, "r@1", Weights.random(LONG, 1))
        blocker = start(client, engine, "blocker")
        await running(client, engine, 1)
        done: list[int] = []

        async def ask(http: httpx.AsyncClient, priority: int) -> None:
            body = {"model": "r@1", "token_ids": [1], "request_id": f"p{priority}"}
            await http.post(
                engine.url + "/inference/v1/generate", json=body | {"priority": priority}
            )
            done.append(priority)

        async with httpx.AsyncClient(timeout=30) as http:
            others = [asyncio.create_task(ask(http, p)) for p in (2, 0, 1)]
            await reach(client, engine.url, lambda health: health.waiting == 3)
            await client.abort(engine.url, "blocker")
            await asyncio.gather(*others)
        assert done == [0, 1, 2]
        await blocker


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "r@9"}, 404, "'r@9' is not resident; resident: r@1"),
        ({"token_ids": []}, 400, "at least one"),
        ({"token_ids": [1, 24]}, 400, "token id 24 is outside the vocabulary of 24"),
        ({"token_ids": [-1]}, 400, "token id -1"),
        ({"token_ids": [True]}, 400, "integer"),
        ({"token_ids": [1] * 128}, 400, "the prompt has 128 tokens; with 128 positions"),
        ({"sampling_params": {"top_p": 2}}, 400, "sampling_params.top_p = 2"),
        ({"sampling_params": {"frequency_penalty": 1}}, 400, "frequency_penalty"),
        ({"stream": True}, 400, "unknown fields stream"),
        ({"priority": "high"}, 400, "priority must be an integer"),
    ],
)
async def test_a_wrong_request_is_refused_with_its_reason(
    engine: Running, client: EngineClient, change: dict[str, Any], status: int, words: str
) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    body = {"model": "r@1", "token_ids": [1, 2], "request_id": "x"} | change
    async with httpx.AsyncClient() as http:
        answer = await http.post(engine.url + "/inference/v1/generate", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


async def test_the_client_tells_refusals_from_outages(
    engine: Running, client: EngineClient
) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    with pytest.raises(
        EngineUnavailable, match=r"404.*not resident"
    ):  # it restarted, or dropped it
        await client.generate(engine.url, "r@2", [1], sampling(), request_id="x", salt="s")
    with pytest.raises(WrongVersion, match="other"):
        await client.generate(
            engine.url, "r@1", [1], sampling(), request_id="x", salt="s", weights_sha256="other"
        )
    with pytest.raises(EngineUnavailable, match="Cannot connect to host"):
        await client.health("http://127.0.0.1:9")


async def test_broken_numbers_are_an_error_that_names_the_policy(
    engine: Running, client: EngineClient
) -> None:
    good = Weights.random(GPT2, 1)
    await engine.serve(client, "r@1", good)
    await engine.serve(client, "r@2", good)
    batch = engine.scheduler._batches["r@2"]  # broken after every check on the way in
    batch.policy.model.transformer.wte.weight[5] = torch.nan
    with pytest.raises(EngineUnavailable, match=r"500.*policy r@2 gave log-probability nan"):
        await client.generate(engine.url, "r@2", [5, 1], sampling(), request_id="x", salt="s")
    answer = await client.generate(engine.url, "r@1", [5, 1], sampling(), request_id="y", salt="s")
    assert len(answer.sampled_ids) == 16
    await idle(client, engine.url)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_whose_thread_died_stops_rather_than_hang(
    long: Running, client: EngineClient
) -> None:
    pending = start(client, long, "a")
    await tokens(long, 5)
    del long.scheduler._batches["r@1"]._rows  # a bug
    with pytest.raises(EngineUnavailable):
        async with asyncio.timeout(15):
            await pending
    with pytest.raises(EngineUnavailable):
        await client.health(long.url)


async def test_loading_is_idempotent_and_a_name_is_used_once(
    engine: Running, client: EngineClient
) -> None:
    weights = Weights.random(GPT2, 1)
    await engine.serve(client, "r@1", weights)
    incarnation = await engine.serve(client, "r@1", weights)
    health = await client.health(engine.url)
    assert (health.incarnation, health.policies) == (incarnation, {"r@1": weights.sha256})
    other = "0" * 64
    for _ in range(2):
        with pytest.raises(EngineRefused, match=f"409.*stands for weights.*{other}"):
            await client.load(engine.url, "r@1", "r@1", other)
        await client.unload(engine.url, "r@1")  # a name stays taken after its policy has gone
    async with httpx.AsyncClient() as http:
        assert (await http.get(engine.url + "/v1/models")).json()["data"] == []


async def test_slots_are_bounded_and_a_full_engine_says_who_holds_them(
    client: EngineClient, tmp_path: Path
) -> None:
    with running_engine(tmp_path, max_resident=2) as engine:
        for version in (1, 2):
            await engine.serve(client, f"r@{version}", Weights.random(LONG, version))
        with pytest.raises(EngineUnavailable, match=r"507.*holds r@1, r@2"):
            await engine.serve(client, "r@3", Weights.random(LONG, 3))
        pending = start(client, engine, "a")
        await tokens(engine, 5)
        await client.unload(engine.url, "r@1")
        with pytest.raises(EngineUnavailable, match="404"):
            await start(client, engine, "b")
        with pytest.raises(EngineUnavailable, match=r"507.*1 requests left"):
            await engine.serve(client, "r@3", Weights.random(LONG, 3))
        await client.abort(engine.url, "a")
        assert (await pending).spans[0][0] == 1  # it ran on its own weights to its end
        await idle(client, engine.url)
        await engine.serve(client, "r@3", Weights.random(LONG, 3))


def missing(w: Weights) -> None:
    del w.tensors["transformer.h.1.mlp.c_fc.weight"]


def unknown(w: Weights) -> None:
    w.tensors["transformer.h.9.mlp.c_fc.weight"] = torch.zeros(1)


def reshaped(w: Weights) -> None:
    w.tensors["transformer.ln_f.weight"] = torch.zeros(33)


def mixed(w: Weights) -> None:
    w.tensors["transformer.ln_f.weight"] = torch.zeros(32, dtype=torch.bfloat16)


def altered(w: Weights) -> None:
    w.tensors["transformer.h.0.mlp.c_fc.weight"] *= 1.3


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (missing, "tensor transformer.h.1.mlp.c_fc.weight of GPT2LMHeadModel is missing"),
        (unknown, "has no tensor transformer.h.9.mlp.c_fc.weight"),
        (reshaped, r"ln_f.weight is \(33,\)"),
        (mixed, "types torch.bfloat16, torch.float32"),
        (altered, "log-probabilities of the probe differ"),
    ],
)
async def test_weights_that_are_not_what_was_promised_never_serve(
    engine: Running, client: EngineClient, tamper: Any, words: str
) -> None:
    weights = Weights.random(GPT2, 1)
    ids = [[1, 2, 3, 4], [7, 8]]
    weights.probe = {
        "token_ids": ids,
        "logprobs": [weights.of(row[:1], tuple(row[1:])).tolist() for row in ids],
    }
    await engine.serve(client, "r@1", weights)
    tamper(weights)
    with pytest.raises(EngineRefused, match=f"422.*{words}"):
        await engine.serve(client, "r@2", weights)
    assert list((await client.health(engine.url)).policies) == ["r@1"]


async def test_weights_of_another_digest_never_serve(engine: Running, client: EngineClient) -> None:
    engine.store.sets["r@1"] = Weights.random(GPT2, 1)
    with pytest.raises(EngineRefused, match=r"422.*its tensors have digest"):
        await client.load(engine.url, "r@1", "r@1", Weights.random(GPT2, 2).sha256)


def test_the_engine_digests_weights_as_the_trainer_does() -> None:
    tensors = Weights.random(GPT2, 1).tensors | {"b": torch.arange(6).view(2, 3).t()}
    assert weights_digest(tensors) == trainer_digest(tensors).hex()


async def test_an_absent_manifest_is_an_outage_of_the_store(
    engine: Running, client: EngineClient
) -> None:
    with pytest.raises(EngineUnavailable, match=r"502.*no manifest"):
        await client.load(engine.url, "r@1", "nowhere", "0" * 64)


async def test_what_is_long_waits_its_turn(client: EngineClient) -> None:
    prompt, params = list(range(10_000)), sampling(max_tokens=5_000)
    async with stub_engine() as stub:
        stub.tokens = None
        long = await client.generate(stub.url, "r@1", prompt, params, request_id="x", salt="s")
        stub.kv_version = lambda version: version - 1
        with pytest.raises(WrongVersion, match="extended KV of version 0"):
            await client.generate(stub.url, "r@1", prompt, params, request_id="y", salt="s")
    assert stub.requests[0]["token_ids"] == prompt
    assert (len(long.sampled_ids), set(long.logprobs)) == (5_000, {-0.5})


async def test_a_black_hole_is_noticed_while_a_request_waits(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.liveness.HEALTH_EVERY_S", 0.2)
    monkeypatch.setattr("activities.inference.HEALTH_TIMEOUT_S", 0.2)

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    hole = await asyncio.start_server(swallow, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hole.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(5):
        with pytest.raises(EngineUnavailable, match="did not answer /health 2 times in a row"):
            await client.generate(url, "r@1", [1], sampling(), request_id="x", salt="s")
    hole.close()


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [3, 4],
        "finish_reason": "length",
        "logprobs": {
            "content": [{"token_id": 3, "logprob": -1.0}, {"token_id": 4, "logprob": -2.0}]
        },
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "kv_version": 1,
    }
    return {"choices": [choice | changes]}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"logprobs": {"content": []}}, EngineRefused, "2 ids and 0 log-probabilities"),
        ({"logprobs": None}, EngineRefused, "2 ids and 0"),
        (
            {
                "logprobs": {
                    "content": [{"token_id": 3, "logprob": -1.0}, {"token_id": 4, "logprob": None}]
                }
            },
            EngineRefused,
            "log-probability None at token 1",
        ),
        ({"weight_versions": [{"version": "2", "start": 0, "end": 2}]}, WrongVersion, "versions"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, EngineRefused, "spans"),
        ({"kv_version": 0}, WrongVersion, "KV of version 0"),
        ({"finish_reason": "error"}, EngineUnavailable, "'error'"),
        ({"token_ids": "34"}, EngineRefused, "expected list"),
    ],
)
async def test_doubtful_answers_are_refused(
    client: EngineClient, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    body = json.dumps(answer(**changes)).encode()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(error, match=words):
        await client.generate(url, "r@1", [1], sampling(), request_id="x", salt="s")
    server.close()
