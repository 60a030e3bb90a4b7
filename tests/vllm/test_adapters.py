"""One adapter a version, several at once: each rollout keeps the version it began with."""

import asyncio
import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from activities.inference import Generated
from domain.config import Lora
from domain.errors import EngineRefused, EngineUnavailable
from tests.integration.engine.lab import Weights, idle, reach, sampling
from tests.vllm.lab import LONG, QWEN3, Lab, Stored, attached_front, probe_of
from trainer import lora
from trainer.model import weights_digest

EXACT = 1e-4
BASE = Weights.random(QWEN3, 0)
LORA = Lora(rank=8, alpha=16)


def adapter(seed: int, *, rank: int = 8) -> Weights:
    """The base model with an adapter in it; seed 0 changes nothing."""
    network: Any = copy.deepcopy(BASE.model)
    lora.adapt(network, LORA.model_copy(update={"rank": rank}), seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_B." in name and seed:
                parameter.normal_(std=0.3)
    return Weights(QWEN3, network.eval(), lora.tensors(network))


def stored(weights: Weights, **changes: Any) -> Stored:
    described = lora.describe(weights.model, LORA)
    found = Stored(
        tensors=weights.tensors,
        promised=weights.tensors,
        sha256=weights_digest(weights.tensors).hex(),
        probe=probe_of(weights),
        adapter=described,
        base="base",
        files={lora.CONFIG: lora.config_file(described)},
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


A = {version: adapter(version) for version in range(4)}
NUMBERS = iter(range(10_000))


async def ask(lab: Lab, ids: list[int], policy: str, salt: str = "", **changes: Any) -> Generated:
    return await lab.client.generate(
        lab.url,
        policy,
        ids,
        sampling(**changes),
        request_id=f"a{next(NUMBERS)}",
        salt=salt or policy,
    )


def error(weights: Weights, ids: list[int], found: Generated) -> float:
    return float((torch.tensor(found.logprobs) - weights.of(ids, found.sampled_ids)).abs().max())


def folders(lab: Lab) -> list[str]:
    return sorted(path.name for path in (Path(lab.source.folder) / "adapters").iterdir())


@contextmanager
def frozen(lab: Lab) -> Iterator[None]:
    """The server's process answers nobody."""
    process = lab.server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def test_version_0_is_an_adapter_that_changes_nothing(adapters: Lab) -> None:
    adapters.source.stored["base"] = Stored(BASE.tensors, BASE.tensors, BASE.sha256, probe_of(BASE))
    await adapters.load("run@0", stored(A[0]))
    ids = [5, 6, 7, 8]
    found = await ask(adapters, ids, "run@0")
    assert found.spans == ((0, 16),)
    assert error(BASE, ids, found) < EXACT


async def test_two_versions_in_one_batch_do_not_touch_each_other(adapters: Lab) -> None:
    await adapters.load("run@1", stored(A[1]))
    health = await adapters.client.health(adapters.url)
    assert (sorted(health.policies), health.max_resident) == (["run@0", "run@1"], 2)
    ids = list(range(40))
    found = await asyncio.gather(
        *(ask(adapters, ids, f"run@{n % 2}", max_tokens=100, seed=n) for n in range(6))
    )
    for n, one in enumerate(found):
        assert one.spans == ((n % 2, 100),)
        assert error(A[n % 2], ids, one) < EXACT
    other = A[1].of(ids, found[0].sampled_ids)
    assert float((torch.tensor(found[0].logprobs) - other).abs().max()) > 0.5


async def test_a_version_is_proven_while_others_are_sampled(adapters: Lab) -> None:
    """Scoring a whole prompt in a batch with other requests would kill the server."""
    await adapters.client.unload(adapters.url, "run@1")
    ids = [9, 8, 7]
    pending = [
        asyncio.create_task(ask(adapters, ids, "run@0", max_tokens=1000, seed=n)) for n in range(6)
    ]
    await reach(adapters.client, adapters.url, lambda health: health.running == 6)
    await adapters.load("run@1", stored(A[1]))
    for found in await asyncio.gather(*pending):
        assert len(found.sampled_ids) == 1000
        assert error(A[0], ids, found) < EXACT


async def test_equal_salts_share_no_kv_across_versions(adapters: Lab) -> None:
    ids = list(range(60, 0, -1)) + [3] * 10
    await ask(adapters, ids, "run@0", salt="s")
    again = await ask(adapters, ids, "run@0", salt="s")
    other = await ask(adapters, ids, "run@1", salt="s")
    assert (again.cached_prompt_tokens, other.cached_prompt_tokens) == (64, 0)
    assert (again.kv_version, other.kv_version) == (0, 1)
    assert error(A[1], ids, other) < EXACT


async def test_no_slot_is_said_by_name(adapters: Lab) -> None:
    with pytest.raises(EngineUnavailable, match=r"507.*run@0, run@1"):
        await adapters.load("run@2", stored(A[2]))


async def test_an_unloaded_version_finishes_what_it_began_and_its_folder_lasts_as_long(
    adapters: Lab,
) -> None:
    """Deleted earlier, a server that evicted the adapter meanwhile would die of reading it."""
    ids, next_one = [1, 2, 3], stored(A[2])
    pending = asyncio.create_task(ask(adapters, ids, "run@0", max_tokens=LONG))
    await reach(adapters.client, adapters.url, lambda health: health.running == 1)
    await adapters.client.unload(adapters.url, "run@0")
    with frozen(adapters):  # the request cannot end meanwhile; what follows asks the front alone
        with pytest.raises(EngineUnavailable, match="not resident any more"):
            await ask(adapters, ids, "run@0")
        with pytest.raises(EngineUnavailable, match=r"run@0 \(requests left\)"):
            await adapters.load("run@2", next_one)
        assert any(name.startswith("run@0-") for name in folders(adapters))
    found = await pending
    assert found.spans == ((0, LONG),)
    assert error(A[0], ids, found) < EXACT
    await idle(adapters.client, adapters.url)
    assert not any(name.startswith("run@0-") for name in folders(adapters))
    await adapters.load("run@2", next_one)
    assert error(A[2], ids, await ask(adapters, ids, "run@2")) < EXACT


async def test_what_is_not_the_promised_adapter_is_refused_and_the_rest_serves_on(
    adapters: Lab,
) -> None:
    await adapters.client.unload(adapters.url, "run@1")
    with pytest.raises(EngineRefused, match=r"422.*other weights"):
        await adapters.load("run@3", stored(A[3], tensors=A[1].tensors))
    with pytest.raises(EngineRefused, match=r"422.*start it without --lora-rank"):
        await adapters.serve("run@3", BASE)
    lame = dict(A[3].tensors)
    lame.pop(next(name for name in lame if "up_proj.lora_B" in name))
    with pytest.raises(EngineRefused, match=r"422.*up_proj"):
        await adapters.load("run@3", stored(A[3], tensors=lame, promised=lame))
    wide = adapter(3, rank=16)
    described = lora.describe(wide.model, Lora(rank=16, alpha=16))
    with pytest.raises(EngineRefused, match=r"422.*rank 16"):
        await adapters.load("run@3", stored(wide, adapter=described))
    with pytest.raises(EngineUnavailable, match="404"):
        await ask(adapters, [1, 2], "run@3")
    assert error(A[2], [1, 2], await ask(adapters, [1, 2], "run@2")) < EXACT
    await adapters.load("run@3", stored(A[3]))
    assert error(A[3], [1, 2], await ask(adapters, [1, 2], "run@3")) < EXACT


async def test_a_front_that_is_attached_takes_the_place_of_an_earlier_ones_adapters(
    adapters: Lab, tmp_path: Path
) -> None:
    """Their folders may be gone, and their slots are wanted."""
    control = adapters.server.control
    assert {"run@2", "run@3"} <= set(await control.models())
    async with attached_front(adapters, tmp_path, adapters=2, lora_rank=8) as lab:
        await lab.load("run@1", stored(A[1]))
        assert sorted(name for name in await control.models() if "@" in name) == ["run@1"]
        assert error(A[1], [1, 2], await ask(lab, [1, 2], "run@1")) < EXACT
    assert await control.healthy()  # it is somebody else's to end
