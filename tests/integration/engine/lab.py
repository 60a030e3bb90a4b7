"""Real engines over HTTP, in threads of the test process, with tiny random models.

Weights come from local folders (`FolderStore`); `test_engine_objects.py` loads through S3.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from activities.inference import EngineClient, Health, SamplingParams
from domain.errors import ObjectMissing
from engine.main import make_server
from engine.scheduler import Scheduler
from engine.weights import Fetched, weights_digest

GPT2 = GPT2Config(
    vocab_size=24, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
    eos_token_id=None, initializer_range=0.4,
)  # fmt: skip
QWEN3 = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
    initializer_range=0.3,
)  # fmt: skip
MISTRAL = MistralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, sliding_window=8,
    bos_token_id=None, eos_token_id=None, initializer_range=0.3,
)  # fmt: skip


@dataclass
class Weights:
    """Random weights of an architecture, and the model that has them."""

    config: PretrainedConfig
    model: Any
    tensors: dict[str, Tensor]
    probe: dict[str, Any] | None = None

    @classmethod
    def random(cls, config: PretrainedConfig, seed: int) -> "Weights":
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
        model.eval()
        tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
        parameters = {p.data_ptr() for p in model.parameters()}
        buffers = {n: t for n, t in model.state_dict().items() if t.data_ptr() not in parameters}
        tensors |= {n: t.clone() for n, t in buffers.items()}
        return cls(config, model, tensors)

    @property
    def sha256(self) -> str:
        return weights_digest(self.tensors)

    @torch.no_grad()
    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Tensor:
        """Log-probabilities [T-1, V] of each next id, by one plain forward."""
        logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        table: Tensor = (logits / temperature).log_softmax(-1)
        return table

    def of(self, prompt: list[int], sampled: tuple[int, ...], temperature: float = 1.0) -> Tensor:
        """Log-probabilities of the sampled ids."""
        table = self.logprobs([*prompt, *sampled], temperature)[len(prompt) - 1 :]
        return table.gather(-1, torch.tensor(sampled)[:, None])[:, 0]


@dataclass
class FolderStore:
    """Weights by manifest name, from the test's own folder."""

    folder: Path
    sets: dict[str, Weights] = field(default_factory=dict)
    promised: dict[str, dict[str, Any]] = field(default_factory=dict)

    def fetch(self, manifest: str, sha256: str) -> Fetched:
        if manifest not in self.sets:
            raise ObjectMissing(f"no manifest {manifest!r}")
        found = self.sets[manifest]
        model, shards = self.folder / f"{manifest}-model", self.folder / f"{manifest}-weights"
        found.config.save_pretrained(model)
        shards.mkdir()
        save_file(found.tensors, shards / "shard-0.safetensors")
        return Fetched(
            weights=shards,
            model=model,
            tensors=self.promised.get(manifest, {}),
            probe=found.probe,
        )


@dataclass
class Running:
    """One engine."""

    url: str
    store: FolderStore
    scheduler: Scheduler

    async def serve(self, client: EngineClient, policy: str, weights: Weights) -> int:
        """Load weights as they are now under this name; the engine's incarnation."""
        self.store.sets[policy] = weights
        return await client.load(self.url, policy, policy, weights.sha256)


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 16, "seed": 1} | changes))


@contextmanager
def running_engine(folder: Path, *, max_resident: int = 4, **limits: Any) -> Iterator[Running]:
    torch.set_num_threads(1)
    store, scheduler = FolderStore(folder), Scheduler(**limits)
    server = make_server(scheduler, store, host="127.0.0.1", port=0, max_resident=max_resident)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield Running(url, store, scheduler)
    finally:
        server.should_exit = True
        thread.join(20)
        scheduler.close()
        listener.close()


async def reach(
    client: EngineClient, url: str, state: Callable[[Health], bool], within_s: float = 10.0
) -> Health:
    """Return once the engine's health is like that; fail if it takes longer."""
    until = time.monotonic() + within_s
    while True:
        health = await client.health(url)
        if state(health):
            return health
        assert time.monotonic() < until, health
        await asyncio.sleep(0.01)


async def idle(client: EngineClient, url: str, within_s: float = 3.0) -> None:
    """Return once nothing runs or waits; fail if that takes longer."""
    await reach(client, url, lambda health: health.running == health.waiting == 0, within_s)
