"""What the engine samples, over HTTP, is what the model says: exactly, whoever shares the batch."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PretrainedConfig

from activities.inference import EngineClient, Generated
from tests.integration.engine.lab import (
    GPT2,
    MISTRAL,
    QWEN3,
    Running,
    Weights,
    running_engine,
    sampling,
)

ROUNDING = 1e-4


def prompt(length: int, seed: int = 0, vocabulary: int = 24) -> list[int]:
    return [(5 * seed + 7 * k + k * k) % vocabulary for k in range(length)]


async def ask(
    client: EngineClient, engine: Running, ids: list[int], name: str = "r@1", **changes: object
) -> Generated:
    salt = str(changes.pop("salt", "s"))
    return await client.generate(
        engine.url,
        name,
        ids,
        sampling(**changes),
        request_id=f"{name}-{changes}-{len(ids)}",
        salt=salt,
    )


@pytest.mark.parametrize("config", [GPT2, QWEN3, MISTRAL], ids=lambda c: c.model_type)
async def test_logprobs_equal_a_plain_forward(
    engine: Running, client: EngineClient, config: PretrainedConfig
) -> None:
    weights = Weights.random(config, 1)
    await engine.serve(client, "r@1", weights)
    lengths = [1, 2, 15, 16, 17, 33, 40, 60, 3, 5, 90, 30]
    answers = await asyncio.gather(
        *(ask(client, engine, prompt(n, n), seed=n, max_tokens=4 + n % 7) for n in lengths)
    )
    for n, answer in zip(lengths, answers, strict=True):
        found = torch.tensor(answer.logprobs)
        assert (found - weights.of(prompt(n, n), answer.sampled_ids)).abs().max() < ROUNDING
        assert answer.finish_reason == "length"
        assert answer.spans == ((1, 4 + n % 7),)


async def test_logprobs_are_processed(engine: Running, client: EngineClient) -> None:
    weights = Weights.random(GPT2, 1)
    await engine.serve(client, "r@1", weights)
    ids = prompt(9)
    warm = await ask(client, engine, ids, temperature=0.7)
    expected = weights.of(ids, warm.sampled_ids, temperature=0.7)
    assert (torch.tensor(warm.logprobs) - expected).abs().max() < ROUNDING
    assert warm.support is None

    cut = await ask(client, engine, ids, temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)
    assert cut.support is not None
    table = weights.logprobs([*ids, *cut.sampled_ids], 0.7)[len(ids) - 1 :]
    for row, token, support, logprob in zip(
        table, cut.sampled_ids, cut.support, cut.logprobs, strict=True
    ):
        kept = row[list(support)].log_softmax(0)
        assert logprob == pytest.approx(float(kept[support.index(token)]), abs=ROUNDING)
        assert 1 <= len(support) <= 9


async def test_a_seed_gives_the_same_ids_whoever_shares_the_batch(
    engine: Running, client: EngineClient
) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    alone = [
        await ask(client, engine, prompt(n), seed=n, salt=f"alone{n}", max_tokens=20 + n)
        for n in range(1, 9)
    ]
    crowd = [
        ask(client, engine, prompt(3 + n, n), seed=100 + n, max_tokens=1 + 3 * n) for n in range(20)
    ]
    answers = await asyncio.gather(
        *crowd,
        *(ask(client, engine, prompt(n), seed=n, max_tokens=20 + n) for n in range(1, 9)),
    )
    assert [a.sampled_ids for a in answers[20:]] == [a.sampled_ids for a in alone]
    other = await ask(client, engine, prompt(8), seed=9, max_tokens=28)
    assert other.sampled_ids != alone[-1].sampled_ids


async def test_several_versions_at_once_each_on_its_own_weights(
    engine: Running, client: EngineClient
) -> None:
    versions = {f"r@{v}": Weights.random(GPT2, v) for v in (1, 2, 3)}
    for name, weights in versions.items():
        await engine.serve(client, name, weights)
    names = [f"r@{1 + n % 3}" for n in range(18)]
    answers = await asyncio.gather(
        *(ask(client, engine, prompt(20), name, seed=n) for n, name in enumerate(names))
    )
    for name, answer in zip(names, answers, strict=True):
        found = torch.tensor(answer.logprobs)
        assert (found - versions[name].of(prompt(20), answer.sampled_ids)).abs().max() < ROUNDING
        assert answer.spans == ((int(name[-1]), 16),)
        assert answer.kv_version == int(name[-1])


async def test_the_prefix_cache_changes_nothing(
    engine: Running, client: EngineClient, tmp_path: Path
) -> None:
    weights = Weights.random(GPT2, 1)
    await engine.serve(client, "r@1", weights)
    first = await ask(client, engine, prompt(50), max_tokens=20)
    assert first.cached_prompt_tokens == 0
    turn = [*prompt(50), *first.sampled_ids, *prompt(9, 4)]
    warm = await ask(client, engine, turn, seed=2)
    assert warm.cached_prompt_tokens == 64  # whole blocks of the 69 ids that have KV
    (tmp_path / "cold").mkdir()
    with running_engine(tmp_path / "cold", prefix_bytes=0) as other:
        await other.serve(client, "r@1", weights)
        cold = await ask(client, other, turn, seed=2)
    assert cold.cached_prompt_tokens == 0
    assert warm.sampled_ids == cold.sampled_ids
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-5)


async def test_kv_never_crosses_salts_or_versions(engine: Running, client: EngineClient) -> None:
    old, new = Weights.random(GPT2, 1), Weights.random(GPT2, 2)
    await engine.serve(client, "r@1", old)
    await engine.serve(client, "r@2", new)
    await ask(client, engine, prompt(50))
    assert (await ask(client, engine, prompt(50))).cached_prompt_tokens == 48
    assert (await ask(client, engine, prompt(50), salt="other")).cached_prompt_tokens == 0
    answer = await ask(client, engine, prompt(50), "r@2")
    assert answer.cached_prompt_tokens == 0
    found = torch.tensor(answer.logprobs)
    assert (found - new.of(prompt(50), answer.sampled_ids)).abs().max() < ROUNDING


async def test_siblings_share_the_prefill_of_their_prompt(
    engine: Running, client: EngineClient
) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    await ask(client, engine, prompt(3))  # warm: the eight below arrive together
    answers = await asyncio.gather(*(ask(client, engine, prompt(70, 3), seed=n) for n in range(8)))
    assert sorted(a.cached_prompt_tokens for a in answers)[1:] == [64] * 7


async def test_older_kv_is_extended_only_where_the_request_allows_it(
    engine: Running, client: EngineClient
) -> None:
    weights = {v: Weights.random(GPT2, v) for v in (1, 2, 3)}
    for version, of_version in weights.items():
        await engine.serve(client, f"r@{version}", of_version)
    await ask(client, engine, prompt(49))
    held = await ask(client, engine, prompt(49), "r@2", kv_max_staleness=1)
    assert (held.kv_version, held.cached_prompt_tokens) == (1, 48)
    recomputed = weights[2].of(prompt(49), held.sampled_ids)
    assert (torch.tensor(held.logprobs) - recomputed).abs().max() > 0.01  # it truly is old KV
    refilled = await ask(client, engine, prompt(49), "r@3", kv_max_staleness=1, salt="s")
    assert (refilled.kv_version, refilled.cached_prompt_tokens) == (3, 0)
    plain = await ask(client, engine, prompt(49), "r@2")
    assert (plain.kv_version, plain.cached_prompt_tokens) == (2, 0)
    found = weights[2].of(prompt(49), plain.sampled_ids)
    assert (torch.tensor(plain.logprobs) - found).abs().max() < ROUNDING


async def test_preempted_requests_go_on_exactly(client: EngineClient, tmp_path: Path) -> None:
    weights = Weights.random(GPT2, 1)
    small = 40 * 2 * 2 * 32 * 4 * 4  # 40 columns for each of 4 rows
    with running_engine(tmp_path, kv_bytes=small, prefix_bytes=0) as engine:
        await engine.serve(client, "r@1", weights)
        answers = await asyncio.gather(
            *(ask(client, engine, prompt(10, n), seed=n, max_tokens=90) for n in range(6))
        )
        async with httpx.AsyncClient() as http:
            metrics = (await http.get(engine.url + "/metrics")).text
    assert "vllm:num_preemptions_total 0" not in metrics
    for n, answer in enumerate(answers):
        assert len(answer.sampled_ids) == 90
        found = torch.tensor(answer.logprobs)
        assert (found - weights.of(prompt(10, n), answer.sampled_ids)).abs().max() < ROUNDING


async def test_long_prompts_are_prefilled_in_pieces(engine: Running, client: EngineClient) -> None:
    config = type(QWEN3)(**(QWEN3.to_dict() | {"max_position_embeddings": 2048}))
    weights = Weights.random(config, 1)
    await engine.serve(client, "r@1", weights)
    lengths = (1300, 7, 700, 512, 513)
    answers = await asyncio.gather(*(ask(client, engine, prompt(n, n)) for n in lengths))
    for n, answer in zip(lengths, answers, strict=True):
        found = torch.tensor(answer.logprobs)
        assert (found - weights.of(prompt(n, n), answer.sampled_ids)).abs().max() < ROUNDING


async def test_stop_ids_and_end_of_sequence_end_and_are_included(
    engine: Running, client: EngineClient
) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    free = await ask(client, engine, prompt(5), max_tokens=40)
    stop = free.sampled_ids[7]
    at = free.sampled_ids.index(stop)
    stopped = await ask(client, engine, prompt(5), max_tokens=40, stop_token_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.sampled_ids == free.sampled_ids[: at + 1]

    ending = type(GPT2)(**(GPT2.to_dict() | {"eos_token_id": stop}))
    await engine.serve(client, "e@1", Weights.random(ending, 1))
    ended = await ask(client, engine, prompt(5), "e@1", max_tokens=40)
    assert (ended.finish_reason, ended.sampled_ids) == ("stop", stopped.sampled_ids)


async def test_positions_bound_the_answer(engine: Running, client: EngineClient) -> None:
    await engine.serve(client, "r@1", Weights.random(GPT2, 1))
    answer = await ask(client, engine, prompt(120), max_tokens=1000)
    assert (answer.finish_reason, len(answer.sampled_ids)) == ("length", 8)
