"""Full weights, replaced in place: provenance, hold and refill, and every wrong set refused."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch

from activities.inference import Crossing, Generated, Health
from domain.errors import EngineBusy, EngineRefused, EngineUnavailable, WrongVersion
from engine.vllm.control import Control
from storage import scratch
from tests.integration.engine.lab import Weights, idle, reach, sampling
from tests.vllm.lab import CONTEXT, LONG, PROBE, QWEN3, Lab, attached_front, probe_of

EXACT = 1e-4
HOLD = Crossing(kv_max_staleness=1, refill=False)
REFILL = Crossing(kv_max_staleness=0, refill=True)
W = {version: Weights.random(QWEN3, version) for version in range(4)}
for _weights in W.values():
    probe_of(_weights)  # not while a request runs that must not end before the load


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def ask(
    lab: Lab, ids: list[int], policy: str, salt: str = "", **changes: object
) -> Generated:
    number = ask.count = getattr(ask, "count", 0) + 1  # type: ignore[attr-defined]
    return await lab.client.generate(
        lab.url,
        policy,
        ids,
        sampling(**changes),
        request_id=f"t{number}",
        salt=salt or policy,
    )


def error(weights: Weights, ids: list[int], found: Generated, temperature: float = 1.0) -> float:
    wanted = weights.of(ids, found.sampled_ids, temperature)
    return float((torch.tensor(found.logprobs) - wanted).abs().max())


async def new_life(lab: Lab, before: int) -> Health:
    """What the front says once it has given its server up."""
    async with asyncio.timeout(60):
        while True:
            try:
                after = await lab.client.health(lab.url)
            except EngineUnavailable:
                after = None  # it says so until then
            if after is not None and after.incarnation != before:
                return after
            await asyncio.sleep(0.1)


async def test_a_front_starts_empty_and_names_what_it_lacks(in_place: Lab) -> None:
    health = await in_place.client.health(in_place.url)
    assert (health.max_resident, health.policies) == (1, {})
    with pytest.raises(EngineUnavailable, match=r"404.*'run@0' is not resident"):
        await ask(in_place, prompt(5), "run@0")


async def test_ids_come_back_with_processed_log_probabilities(in_place: Lab) -> None:
    await in_place.serve("run@0", W[0])
    ids = prompt(40)
    for temperature in (1.0, 0.7):
        found = await ask(in_place, ids, "run@0", temperature=temperature)
        assert len(found.sampled_ids) == 16
        assert found.spans == ((0, 16),)
        assert error(W[0], ids, found, temperature) < EXACT


async def test_a_request_that_is_less_urgent_is_sampled_alike(in_place: Lab) -> None:
    """What is evaluated comes behind what is trained; by itself vLLM refuses to be told so."""
    urgent, later = [
        await in_place.client.generate(
            in_place.url, "run@0", prompt(9), sampling(), request_id=f"p{n}", salt="p", priority=n
        )
        for n in range(2)
    ]
    assert urgent.sampled_ids == later.sampled_ids


async def test_a_known_prefix_is_cached_under_its_salt_only(in_place: Lab) -> None:
    ids = prompt(70, seed=1)
    first = await ask(in_place, ids, "run@0", salt="a")
    again = await ask(in_place, ids, "run@0", salt="a")
    other = await ask(in_place, ids, "run@0", salt="b")
    assert [g.cached_prompt_tokens for g in (first, again, other)] == [0, 64, 0]
    assert again.sampled_ids == first.sampled_ids
    assert {g.kv_version for g in (first, again, other)} == {0}


async def test_stop_ids_are_kept_and_end_the_request(in_place: Lab) -> None:
    ids = prompt(10)
    free = await ask(in_place, ids, "run@0")
    stop = free.sampled_ids[3]
    found = await ask(in_place, ids, "run@0", stop_token_ids=(stop,))
    assert found.finish_reason == "stop"
    assert found.sampled_ids == free.sampled_ids[: free.sampled_ids.index(stop) + 1]


async def test_an_abort_returns_what_was_sampled(in_place: Lab) -> None:
    ids = prompt(8)
    pending = asyncio.create_task(
        in_place.client.generate(
            in_place.url, "run@0", ids, sampling(max_tokens=LONG), request_id="long", salt="s"
        )
    )
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await asyncio.sleep(0.3)
    await in_place.client.abort(in_place.url, "long")
    found = await pending
    assert found.finish_reason == "abort"
    assert 0 < len(found.sampled_ids) < LONG
    assert error(W[0], ids, found) < EXACT


async def test_a_cancelled_caller_leaves_nothing_running_and_gets_the_partial(
    in_place: Lab,
) -> None:
    partial: list[Generated] = []
    pending = asyncio.create_task(
        in_place.client.generate(
            in_place.url,
            "run@0",
            prompt(8),
            sampling(max_tokens=LONG),
            request_id="cancelled",
            salt="s",
            on_partial=partial.append,
        )
    )
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await asyncio.sleep(0.3)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert partial
    assert partial[0].sampled_ids
    await idle(in_place.client, in_place.url)
    text = await in_place.server.control.metrics()
    assert 'vllm:num_requests_running{engine="0",model_name="base"} 0.0' in text


async def test_filtered_sampling_is_refused_where_no_kept_sets_come_back(in_place: Lab) -> None:
    with pytest.raises(EngineRefused, match="--return-sampling-mask"):
        await ask(in_place, prompt(5), "run@0", top_k=5)


@pytest.mark.parametrize(
    ("ids", "status"), [([1] * CONTEXT, "400"), ([64], "400")], ids=["too long", "unknown id"]
)
async def test_impossible_requests_are_refused_in_the_servers_words(
    in_place: Lab, ids: list[int], status: str
) -> None:
    with pytest.raises(EngineRefused, match=status):
        await ask(in_place, ids, "run@0")


async def test_a_new_version_takes_the_place_of_the_one_before(in_place: Lab) -> None:
    ids = prompt(70, seed=2)
    await ask(in_place, ids, "run@0", salt="same")
    await in_place.serve("run@1", W[1])
    health = await in_place.client.health(in_place.url)
    assert list(health.policies) == ["run@1"]
    found = await ask(in_place, ids, "run@1", salt="same")
    assert found.spans == ((1, 16),)
    # The salt is the same, the cache is not: no KV of version 0 under version 1.
    assert found.cached_prompt_tokens == 0
    assert error(W[1], ids, found) < EXACT
    with pytest.raises(EngineUnavailable, match="not resident any more"):
        await ask(in_place, ids, "run@0")


async def test_requests_that_may_not_cross_end_under_their_own_version(in_place: Lab) -> None:
    ids = prompt(8)
    pending = asyncio.create_task(ask(in_place, ids, "run@1", max_tokens=300))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await in_place.serve("run@2", W[2])
    found = await pending
    assert found.spans == ((1, 300),)
    assert error(W[1], ids, found) < EXACT


async def test_a_held_request_goes_on_with_its_kv_and_says_where_the_version_changed(
    in_place: Lab,
) -> None:
    ids = prompt(40, seed=3)
    pending = asyncio.create_task(ask(in_place, ids, "run@2", max_tokens=LONG, swap_kv_bound=1))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await asyncio.sleep(0.1)
    await in_place.serve("run@3", W[3], crossing=HOLD)
    found = await pending
    (old, before), (new, after) = found.spans
    assert (old, new, before + after, found.kv_version) == (2, 3, LONG, 2)
    tables = [W[v].of(ids, found.sampled_ids) for v in (2, 3)]
    got = torch.tensor(found.logprobs)
    assert float((got - tables[0])[:before].abs().max()) < EXACT
    # New weights over KV of the old ones: neither version's own distribution.
    assert float((got - tables[0])[before:].abs().max()) > 0.1
    assert float((got - tables[1])[before:].abs().max()) > 0.1


async def test_a_refilled_request_goes_on_as_if_the_new_version_had_read_it_all(
    in_place: Lab,
) -> None:
    ids = prompt(40, seed=4)
    pending = asyncio.create_task(ask(in_place, ids, "run@3", max_tokens=LONG, swap_kv_bound=1))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await asyncio.sleep(0.1)
    await in_place.serve("run@4", W[0], crossing=REFILL)
    found = await pending
    (_, before), (new, after) = found.spans
    assert (new, before + after) == (4, LONG)
    got = torch.tensor(found.logprobs)
    assert float((got - W[3].of(ids, found.sampled_ids))[:before].abs().max()) < EXACT
    assert float((got - W[0].of(ids, found.sampled_ids))[before:].abs().max()) < EXACT


async def test_two_versions_in_an_answer_are_refused_where_one_was_asked_for(
    in_place: Lab,
) -> None:
    pending = asyncio.create_task(ask(in_place, prompt(8), "run@4", max_tokens=480))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await in_place.serve("run@5", W[1], crossing=HOLD)
    with pytest.raises(WrongVersion, match=r"\(4, .*\(5, "):
        await pending


async def test_kv_within_the_bound_is_extended_and_older_is_not(in_place: Lab) -> None:
    ids = prompt(70, seed=5)
    await ask(in_place, ids, "run@5", salt="run")
    await in_place.serve("run@6", W[2], crossing=HOLD)
    held = await ask(in_place, ids, "run@6", salt="run", kv_max_staleness=1)
    assert (held.cached_prompt_tokens, held.kv_version) == (64, 5)
    fresh = await ask(in_place, ids, "run@6", salt="run")
    assert (fresh.cached_prompt_tokens, fresh.kv_version) == (0, 6)
    assert error(W[2], ids, fresh) < EXACT


async def test_a_set_that_lacks_a_tensor_is_refused_and_the_server_serves_on(
    in_place: Lab,
) -> None:
    lame = dict(W[3].tensors)
    lame.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(EngineRefused, match="up_proj"):
        await in_place.serve("run@7", W[3], tensors=lame)
    with pytest.raises(EngineRefused, match="up_proj"):
        await in_place.serve("run@7", W[3], tensors=lame, promised=lame)
    assert error(W[2], PROBE[0], await ask(in_place, PROBE[0], "run@6")) < EXACT


async def test_weights_that_do_not_reproduce_the_probe_never_sample(in_place: Lab) -> None:
    """vLLM took them: only the probe tells. What ran meanwhile is not answered with its tokens."""
    ids = prompt(8)
    pending = asyncio.create_task(ask(in_place, ids, "run@6", max_tokens=LONG, swap_kv_bound=1))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    await asyncio.sleep(0.3)
    with pytest.raises(EngineRefused, match="other weights"):
        await in_place.serve("run@7", W[3], tensors=W[0].tensors, crossing=HOLD)
    with pytest.raises(EngineUnavailable, match="turned out to be wrong"):
        await pending
    with pytest.raises(EngineUnavailable, match="404"):
        await ask(in_place, ids, "run@7")
    found = await ask(in_place, ids, "run@6")
    assert error(W[2], ids, found) < EXACT


async def test_a_small_update_that_did_not_arrive_is_noticed(in_place: Lab) -> None:
    """Below the tolerance of the probe: told apart by which version's numbers are nearer."""
    nudged = Weights.random(QWEN3, 2)
    with torch.no_grad():
        for parameter in nudged.model.parameters():
            parameter.mul_(1.00005)
    moved = Weights(nudged.config, nudged.model, dict(nudged.model.named_parameters()))
    gap = max(
        abs(a - b)
        for new, old in zip(probe_of(moved)["logprobs"], probe_of(W[2])["logprobs"], strict=True)
        for a, b in zip(new, old, strict=True)
    )
    assert 2e-4 < gap < 1e-3
    with pytest.raises(EngineRefused, match="kept the old weights"):
        await in_place.serve("run@7", W[2], probe=probe_of(moved), sha256="7" * 64)
    await in_place.serve("run@6", W[2])


async def test_a_name_never_stands_for_other_weights(in_place: Lab) -> None:
    with pytest.raises(EngineRefused, match="409"):
        await in_place.serve("run@0", W[3])


async def test_more_requests_than_may_wait_are_sent_away(in_place: Lab) -> None:
    """vLLM queues without a bound; the front says 429, and callers try again."""
    found = await asyncio.gather(
        *(ask(in_place, prompt(4), "run@6", max_tokens=100) for _ in range(20)),
        return_exceptions=True,
    )
    busy = [one for one in found if isinstance(one, EngineBusy)]
    answered = [one for one in found if isinstance(one, Generated)]
    assert (len(busy), len(answered)) == (8, 12)
    assert {len(one.sampled_ids) for one in answered} == {100}


async def test_an_abort_of_nothing_aborts_nothing(in_place: Lab) -> None:
    """vLLM would take an empty list for everything."""
    pending = asyncio.create_task(ask(in_place, prompt(4), "run@6", max_tokens=300))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            in_place.url + "/inference/v1/abort_requests", json={"request_ids": []}
        )
    assert answer.status_code == 200
    found = await pending
    assert (found.finish_reason, len(found.sampled_ids)) == ("length", 300)


async def test_after_a_reload_that_failed_the_version_before_is_served_again(
    in_place: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are gone then: computing with what is left would end the server."""
    reload, broken = Control.reload, [Path("/nowhere")]

    async def off_a_disk_that_broke(control: Control, folder: Path) -> None:
        await reload(control, broken.pop() if broken else folder)

    monkeypatch.setattr(Control, "reload", off_a_disk_that_broke)
    with pytest.raises(EngineUnavailable, match=r"run@7 could not be loaded.*nowhere"):
        await in_place.serve("run@7", W[3])
    ids = prompt(12)
    found = await ask(in_place, ids, "run@6")
    assert found.spans == ((6, 16),)
    assert error(W[2], ids, found) < EXACT


async def test_a_server_that_dies_leaves_an_empty_front_with_a_new_incarnation(
    in_place: Lab,
) -> None:
    before = await in_place.client.health(in_place.url)
    pending = asyncio.create_task(ask(in_place, prompt(8), "run@6", max_tokens=LONG))
    await reach(in_place.client, in_place.url, lambda health: health.running == 1)
    sockets = in_place.sockets()
    assert {path.parent.name.startswith(scratch.prefix("vllm")) for path in sockets} == {True}
    assert in_place.server._process is not None
    in_place.server._process.kill()
    with pytest.raises(EngineUnavailable):
        await pending
    after = await new_life(in_place, before.incarnation)
    assert after.policies == {}
    # The next load starts another server, under a name that the front no longer knows.
    assert await in_place.serve("run@6", W[2]) == after.incarnation
    ids = prompt(9)
    assert error(W[2], ids, await ask(in_place, ids, "run@6")) < EXACT
    assert not any(path.parent.exists() for path in sockets)


async def test_a_front_that_is_attached_replaces_what_the_server_has_and_sees_it_end(
    in_place: Lab, tmp_path: Path
) -> None:
    ids = prompt(12)
    async with attached_front(in_place, tmp_path) as lab:
        await lab.serve("other@3", W[1])  # a server's own weights are nobody's: replaced
        before = await lab.client.health(lab.url)
        found = await ask(lab, ids, "other@3")
        assert found.spans == ((3, 16),)
        assert error(W[1], ids, found) < EXACT
        assert in_place.server._process is not None
        in_place.server._process.kill()
        after = await new_life(lab, before.incarnation)
        assert after.policies == {}
        with pytest.raises(EngineUnavailable, match="does not answer /health"):
            await lab.serve("other@4", W[2])
