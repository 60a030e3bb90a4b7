"""A model that sees, one adapter a version: each version looks at an image with its own weights."""

import asyncio
import copy
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from activities.chat import Chat
from activities.inference import Generated
from domain.capabilities import IMAGES
from domain.config import Lora
from domain.errors import EngineRefused
from tests.integration.engine.lab import Weights, sampling
from tests.vllm import sights
from tests.vllm.lab import Lab, Stored, running_front
from trainer import lora
from trainer.model import weights_digest

EXACT = 1e-4
WIDE = sights.picture((200, 30, 20), 56, 28)
LORA = Lora(rank=8, alpha=16, targets=("gate_proj", "up_proj", "down_proj"))
"""Layers that the text model has and the one that reads pixels has not."""


@pytest_asyncio.fixture(scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with running_front(
        tmp_path_factory.mktemp("seeing-adapters"),
        describe=sights.materialise,
        images=4,
        adapters=2,
        lora_rank=8,
        max_context=sights.CONTEXT,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return sights.weights(sights.materialise(tmp_path_factory.mktemp("seeing")), 0)


def adapter(base: Weights, seed: int, lora_of: Lora = LORA) -> Weights:
    network: Any = copy.deepcopy(base.model)
    lora.adapt(network, lora_of, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".lora_B." in name and seed:
                parameter.normal_(std=0.3)
    return Weights(base.config, network.eval(), lora.tensors(network))


def stored(weights: Weights) -> Stored:
    described = lora.describe(weights.model, LORA)
    return Stored(
        tensors=weights.tensors,
        promised=weights.tensors,
        sha256=weights_digest(weights.tensors).hex(),
        probe=None,  # it is text, and says nothing about what a model sees
        adapter=described,
        base="base",
        files={lora.CONFIG: lora.config_file(described)},
    )


def error(weights: Weights, found: Generated) -> float:
    assert found.prompt_ids is not None
    wanted = sights.logprobs(weights, found.prompt_ids, found.sampled_ids, [WIDE])
    return max(abs(a - b) for a, b in zip(found.logprobs, wanted, strict=True))


async def test_each_version_sees_an_image_with_its_own_weights(
    lab: Lab, base: Weights, tmp_path: Path
) -> None:
    lab.source.stored["base"] = Stored(base.tensors, base.tensors, base.sha256, None)
    versions = [adapter(base, seed) for seed in (0, 1)]
    for version, weights in enumerate(versions):
        await lab.load(f"run@{version}", stored(weights))
    assert IMAGES in (await lab.client.health(lab.url)).capabilities

    sights.materialise(tmp_path)
    chat = Chat.open(tmp_path)
    mark = chat.image_id
    assert mark is not None
    ids = [*chat.encode("what is "), mark, *chat.encode("?")]
    requests = count()

    async def ask(version: int, seed: int) -> Generated:
        return await lab.client.generate(
            lab.url,
            f"run@{version}",
            ids,
            sampling(max_tokens=8, seed=seed),
            request_id=f"s{next(requests)}",
            salt="run",
            images=[{"type": "image_url", "url": WIDE.url, "uuid": WIDE.sha256}],
        )

    found = await asyncio.gather(*(ask(n % 2, n) for n in range(6)))
    for n, one in enumerate(found):
        assert error(versions[n % 2], one) < EXACT
        assert error(versions[1 - n % 2], one) > 0.01


async def test_an_adapter_of_what_reads_images_is_refused_by_name(lab: Lab, base: Weights) -> None:
    """vLLM would sample from the text model's part of it, and say nothing."""
    both = adapter(base, 1, lora_of=LORA.model_copy(update={"targets": ("q_proj",)}))
    assert any("text_model" in name for name in both.tensors)
    await lab.client.unload(lab.url, "run@1")  # a slot is free
    with pytest.raises(EngineRefused, match=r"422.*adapts .*vision_model.*text model's layers"):
        await lab.load("run@2", stored(both))
