"""Weights through a real object store: fetched, verified, served, and refused when tampered with."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from activities.inference import EngineClient
from domain.errors import EngineRefused, EngineUnavailable
from domain.services import Services
from engine.main import make_server
from engine.objects import ObjectSource
from engine.scheduler import Scheduler
from storage import manifests
from storage.objects import ObjectStore, digest
from tests.integration.engine.lab import GPT2, Weights, sampling

MODEL_SHA = "ab" * 32


@pytest.fixture
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def url(store: ObjectStore, cache: Path) -> Iterator[str]:
    scheduler = Scheduler()
    source = ObjectSource(store, cache)
    server = make_server(scheduler, source, host="127.0.0.1", port=0, max_resident=2)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    scheduler.close()
    listener.close()


def publish(store: ObjectStore, run: str, weights: Weights, tmp_path: Path) -> str:
    weights.config.save_pretrained(tmp_path / "model")
    config = (tmp_path / "model" / "config.json").read_bytes()
    model = manifests.upload(
        store, f"models/{run}", {"config.json": config}, kind="model", sha256=MODEL_SHA
    )
    ids = [[1, 2, 3, 4]]
    stored = manifests.upload(
        store,
        f"weights/{run}/1/{weights.sha256}",
        {"shard-0.safetensors": save(weights.tensors)},
        kind="weights",
        sha256=weights.sha256,
        tensors={
            name: {"dtype": "float32", "shape": list(t.shape), "file": "shard-0.safetensors"}
            for name, t in weights.tensors.items()
        },
        meta={
            "model": model.manifest_key,
            "probe": {
                "token_ids": ids,
                "logprobs": [weights.of(row[:1], tuple(row[1:])).tolist() for row in ids],
            },
        },
    )
    return stored.manifest_key


def shards_below(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


async def test_a_published_version_is_served_exactly(
    url: str, store: ObjectStore, client: EngineClient, cache: Path, tmp_path: Path
) -> None:
    weights = Weights.random(GPT2, 1)
    manifest = publish(store, "exact", weights, tmp_path)
    assert await client.load(url, "exact@1", manifest, weights.sha256) > 0
    answer = await client.generate(
        url,
        "exact@1",
        [1, 2, 3],
        sampling(),
        request_id="x",
        salt="s",
        weights_sha256=weights.sha256,
    )
    found = torch.tensor(answer.logprobs)
    assert (found - weights.of([1, 2, 3], answer.sampled_ids)).abs().max() < 1e-4
    assert shards_below(cache) == []  # weights are in memory, not on disk too


async def test_tampered_bytes_never_serve(
    url: str, store: ObjectStore, client: EngineClient, tmp_path: Path
) -> None:
    weights = Weights.random(GPT2, 1)
    manifest = publish(store, "tampered", weights, tmp_path)
    shard = manifest.replace("manifest.json", "shard-0.safetensors")
    content = bytearray(store.get(shard))
    content[-3] ^= 1
    store.delete([shard])
    tampered = tmp_path / "tampered"
    tampered.write_bytes(content)
    store.put_new(shard, tampered, sha256=digest(tampered))
    with pytest.raises(EngineRefused, match=r"422.*sha256"):
        await client.load(url, "tampered@1", manifest, weights.sha256)
    with pytest.raises(EngineRefused, match=r"422.*was promised"):
        await client.load(url, "tampered@1", manifest, "cd" * 32)
    assert (await client.health(url)).policies == {}


async def test_an_upload_without_its_manifest_is_not_there(
    url: str, store: ObjectStore, client: EngineClient, tmp_path: Path
) -> None:
    weights = Weights.random(GPT2, 1)
    manifest = publish(store, "half", weights, tmp_path)
    store.delete([manifest])
    with pytest.raises(EngineUnavailable, match=r"502.*half"):
        await client.load(url, "half@1", manifest, weights.sha256)
