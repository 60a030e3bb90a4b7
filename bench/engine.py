"""Tokens per second of the engine over HTTP, against transformers.generate.

    python -m bench.engine [--folder MODEL] [--threads 1] [--tokens 128]

Without a folder: a random GPT-2 of the size that demos train. Both sides sample at temperature 1
from the same prompts; the engine also returns log-probabilities. Each figure is the
best of five, taken in turns.
"""

import argparse
import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import httpx
import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from activities.inference import EngineClient, SamplingParams
from engine.main import make_server
from engine.scheduler import Scheduler
from engine.weights import Fetched, weights_digest

BATCHES = (1, 8, 32)
PROMPT = 16
REPEATS = 5
WAVES = 3
POLICY = "bench@1"


class Folder:
    """Serves one model folder as any manifest."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model = model
        self._scratch = scratch

    def fetch(self, manifest: str, sha256: str) -> Fetched:
        """The folder's weights, written as one shard."""
        model = AutoModelForCausalLM.from_pretrained(
            self._model, dtype=torch.float32, use_safetensors=True
        )
        self._scratch.mkdir()
        tensors = {n: p.detach() for n, p in model.named_parameters()}
        save_file(tensors, self._scratch / "shard-0.safetensors")
        return Fetched(weights=self._scratch, model=self._model, tensors={}, probe=None)


@dataclass(frozen=True)
class Rate:
    """Tokens a second of wall clock, and of CPU time of the process that computes."""

    wall: float
    cpu: float

    @classmethod
    def best(cls, rates: Sequence["Rate"]) -> "Rate":
        """The best of each, which busy neighbours spoil least."""
        return cls(max(r.wall for r in rates), max(r.cpu for r in rates))


class Stopwatch:
    """Measures one side."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._cpu = self._cpu_time()
        self._wall = time.perf_counter()

    def rate(self, tokens: int) -> Rate:
        """Since the start."""
        wall = time.perf_counter() - self._wall
        return Rate(tokens / wall, tokens / max(self._cpu_time() - self._cpu, 1e-9))

    def _cpu_time(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def generate_rate(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> Rate:
    """transformers.generate."""
    ids = torch.tensor(prompts)
    watch = Stopwatch(psutil.Process())
    for _ in range(WAVES):
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
    return watch.rate(WAVES * len(prompts) * tokens)


async def engine_rate(
    client: EngineClient, url: str, pid: int, prompts: list[list[int]], tokens: int, salt: str
) -> Rate:
    """The engine, requests and answers included. Every wave has a salt of its own: no prefix hits."""
    watch, sampled = Stopwatch(psutil.Process(pid)), 0
    for wave in range(WAVES):
        answers = await asyncio.gather(
            *(
                client.generate(
                    url,
                    POLICY,
                    prompt,
                    SamplingParams(max_tokens=tokens, seed=n),
                    request_id=f"{salt}-{wave}-{n}",
                    salt=f"{salt}-{wave}",
                )
                for n, prompt in enumerate(prompts)
            )
        )
        sampled += sum(len(a.sampled_ids) for a in answers)
    return watch.rate(sampled)


async def compare(url: str, pid: int, model: torch.nn.Module, tokens: int) -> None:
    """Print the table."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    client = EngineClient()
    await client.load(url, POLICY, "bench", weights_digest(dict(model.named_parameters())))
    print("       tokens per second               tokens per CPU second")
    print("batch    generate     engine  ratio    generate     engine  ratio")
    for batch in BATCHES:
        prompts = torch.randint(vocabulary, (batch, PROMPT)).tolist()
        theirs, ours = [], []
        for repeat in range(REPEATS):
            theirs.append(generate_rate(model, prompts, tokens))
            ours.append(await engine_rate(client, url, pid, prompts, tokens, f"{batch}-{repeat}"))
        a, b = Rate.best(theirs), Rate.best(ours)
        print(
            f"{batch:>5} {a.wall:>11.0f} {b.wall:>10.0f} {b.wall / a.wall:>6.2f} "
            f"{a.cpu:>11.0f} {b.cpu:>10.0f} {b.cpu / a.cpu:>6.2f}"
        )
    await client.aclose()


@contextmanager
def serving(folder: Path, scratch: Path, threads: int) -> Iterator[tuple[str, int]]:
    """An engine in a process of its own; its URL and process id."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = get_context("spawn").Process(target=serve, args=(folder, scratch, threads, port))
    process.start()
    assert process.pid is not None
    url = f"http://127.0.0.1:{port}"
    try:
        while process.is_alive():
            with suppress(httpx.TransportError):
                httpx.get(url + "/health")
                break
            time.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        process.join()


def serve(folder: Path, scratch: Path, threads: int, port: int) -> None:
    """The engine's process."""
    torch.set_num_threads(threads)
    scheduler = Scheduler()
    source = Folder(folder, scratch)
    make_server(scheduler, source, host="127.0.0.1", port=port, max_resident=1).run()
    scheduler.close()


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="a Hugging Face causal language model")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    chosen = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "tiny"
        if chosen.folder is None:
            config = GPT2Config(
                vocab_size=12, n_positions=256, n_embd=64, n_layer=2, n_head=4,
                bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
            tiny = GPT2LMHeadModel(config)
            tiny.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True
        )
        model.requires_grad_(False)
        with serving(folder, Path(scratch) / "weights", chosen.threads) as (url, pid):
            asyncio.run(compare(url, pid, model, chosen.tokens))


if __name__ == "__main__":
    main()
