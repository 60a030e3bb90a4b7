"""A real vLLM server behind its front, in this event loop, with tiny random models.

Weights come from the test's own folder (`FolderSource`); `test_vllm_run.py` goes through S3.
"""

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import Qwen3Config

from activities.inference import Crossing, EngineClient
from domain.errors import ObjectMissing
from domain.services import vllm_python
from engine.vllm.command import Settings
from engine.vllm.main import make_server
from engine.vllm.server import AttachedServer, OwnServer, Server
from engine.vllm.sets import WeightSet, weight_set
from rollbook.stack import ports
from storage.manifests import File, Manifest, Tensor
from tests.integration.engine.lab import Weights

CONTEXT = 4096
LONG = 4000
"""Sampled tokens that take seconds, so that a request still runs when something happens to it."""
QWEN3 = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=CONTEXT,
    initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
PROBE = [[(row * 17 + column * 7) % 64 for column in range(12)] for row in range(3)]
_fetches = itertools.count()


def describe_qwen3(folder: Path) -> None:
    """Write the model folder of QWEN3, weights apart."""
    QWEN3.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(QWEN3.vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


_probes: dict[str, dict[str, Any]] = {}


def probe_of(weights: Weights) -> dict[str, Any]:
    """What a trainer with these weights would say about PROBE; known for good once it was asked.

    Computing it holds up this event loop, and with it the front, while a server goes on sampling.
    """
    known = weights.sha256
    if known in _probes:
        return _probes[known]
    logprobs = []
    for ids in PROBE:
        table = weights.logprobs(ids)
        logprobs.append(table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    _probes[known] = {"token_ids": PROBE, "logprobs": logprobs}
    return _probes[known]


@dataclass
class Stored:
    """A version as a store would hold it; tests spoil one field at a time."""

    tensors: dict[str, torch.Tensor]
    promised: dict[str, torch.Tensor]
    """What the manifest lists."""
    sha256: str
    probe: dict[str, Any] | None
    adapter: dict[str, Any] | None = None
    base: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class FolderSource:
    """Sets by manifest name; each fetch writes them anew, as the object store's does."""

    folder: Path
    describe: Callable[[Path], object]
    """Writes the model folder of what is stored."""
    stored: dict[str, Stored] = field(default_factory=dict)

    def fetch(self, manifest: str, sha256: str | None) -> WeightSet:
        if manifest not in self.stored:
            raise ObjectMissing(f"no manifest {manifest!r}")
        found = self.stored[manifest]
        folder = self.folder / "weights" / f"{manifest}-{next(_fetches)}"
        folder.mkdir(parents=True)
        name = "model.safetensors" if found.adapter is None else "adapter_model.safetensors"
        save_file(found.tensors, folder / name, metadata={"format": "pt"})
        for file, content in found.files.items():
            (folder / file).write_bytes(content)
        described = Manifest(
            kind="weights",
            sha256=found.sha256,
            files={name: File(sha256="0" * 64, bytes=0)},
            tensors={
                key: Tensor(
                    dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), file=name
                )
                for key, t in found.promised.items()
            },
            meta={
                "model": "model",
                "probe": found.probe,
                "adapter": found.adapter,
                "base": found.base,
            },
        )
        return weight_set(manifest, described, folder)

    def fetch_model(self, manifest: str) -> Path:
        folder = self.folder / "model"
        if not folder.exists():
            folder.mkdir(parents=True)
            self.describe(folder)
        return folder


@dataclass
class Lab:
    """One front with its server."""

    url: str
    source: FolderSource
    server: OwnServer
    """The one that computes, whoever's front started it."""
    client: EngineClient

    async def serve(
        self, policy: str, weights: Weights, *, crossing: Crossing | None = None, **spoilt: Any
    ) -> int:
        """Load full weights under this name; the engine's incarnation."""
        stored = Stored(weights.tensors, weights.tensors, weights.sha256, probe_of(weights))
        for name, value in spoilt.items():
            setattr(stored, name, value)
        return await self.load(policy, stored, crossing=crossing)

    def sockets(self) -> set[Path]:
        """Unix sockets that the server's processes hold."""
        assert self.server._process is not None
        root = psutil.Process(self.server._process.pid)
        family = [root, *root.children(recursive=True)]
        held = {str(c.laddr) for one in family for c in one.net_connections(kind="unix")}
        return {Path(address) for address in held - {""}}

    async def load(self, policy: str, stored: Stored, *, crossing: Crossing | None = None) -> int:
        self.source.stored[policy] = stored
        return await self.client.load(self.url, policy, policy, stored.sha256, crossing=crossing)


@asynccontextmanager
async def running_front(
    folder: Path, *, describe: Callable[[Path], object] = describe_qwen3, **changes: Any
) -> AsyncIterator[Lab]:
    """A front; its server starts with the first load."""
    settings = settings_with(**changes)
    own = OwnServer(settings, os.environ, folder / "vllm.log")
    async with _serving(settings, own, own, FolderSource(folder, describe)) as lab:
        yield lab


@asynccontextmanager
async def attached_front(keeper: Lab, folder: Path, **changes: Any) -> AsyncIterator[Lab]:
    """Another front over the server that `keeper`'s front has started, as whoever keeps one has."""
    settings, source = settings_with(**changes), FolderSource(folder, describe_qwen3)
    source.stored.update(keeper.source.stored)
    attached = AttachedServer(keeper.server.control.url, settings)
    async with _serving(settings, attached, keeper.server, source) as lab:
        yield lab


def settings_with(**changes: Any) -> Settings:
    """For a tiny model."""
    torch.set_num_threads(1)
    python = vllm_python(os.environ)
    assert python is not None
    common = {"max_batch": 8, "max_context": CONTEXT, "threads": 1}
    return Settings(python=python, **(common | changes))


@asynccontextmanager
async def _serving(
    settings: Settings, asked: Server, computing: OwnServer, source: FolderSource
) -> AsyncIterator[Lab]:
    port = ports.choose(0)
    server = make_server(settings, asked, source, source.folder, host="127.0.0.1", port=port)
    serving = asyncio.create_task(server.serve())
    client = EngineClient()
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield Lab(f"http://127.0.0.1:{port}", source, computing, client)
    finally:
        await client.aclose()
        server.should_exit = True
        await serving
        shutil.rmtree(source.folder, ignore_errors=True)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """Some digest; the front compares names, the store compares bytes."""
    return sha256(b"".join(t.numpy().tobytes() for _, t in sorted(tensors.items()))).hexdigest()
