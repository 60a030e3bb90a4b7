"""Publishing 135M parameters to two engines, against copying the same bytes: `python -m bench.publish`.

A random model of SmolLM2-135M's shape (float32, 538 MB), the embedded S3, and two built-in engines as
processes of their own. *Plain* is boto3's `upload_file` and two `download_file` at once. *Publish* is
what a run does: the trainer's probe, file and manifest, then both engines at once fetching it, checking
every digest, building the model and reproducing the trainer's probe. The weights' digest is the step's
own, published or not, and is told by itself. Each figure is the best of the rounds, taken in turns, and
the parts of a publication are told apart.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import torch
from transformers import LlamaConfig

from activities.inference import EngineClient
from domain.config import RunConfig
from domain.errors import EngineError
from domain.services import Services
from rollbook.root import ROOT
from rollbook.stack import ports
from rollbook.stack.child import Command
from rollbook.stack.stack import Stack
from rollbook.stack.supervise import Supervisor
from storage import manifests
from storage.objects import ObjectStore
from trainer import publishing, tensor_files
from trainer.model import Policy, weights_digest

SHAPE = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
START_S = 180.0


def engines(supervisor: Supervisor, services: Services, state: Path, logs: Path) -> list[str]:
    """Start two engines; their addresses."""
    taken: list[int] = []
    for number in range(2):
        taken.append(ports.choose(0, taken))
        arguments = ("engine", "--port", str(taken[-1]), "--threads", "1", "--max-resident", "2")
        supervisor.start(
            Command(
                name=f"engine-{number}",
                argv=(
                    sys.executable,
                    "-m",
                    "rollbook",
                    *arguments,
                    "--state",
                    str(state / str(number)),
                ),
                log=logs / f"engine-{number}.log",
                env={**os.environ, **services.environment(), "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
            )
        )
    return [f"http://127.0.0.1:{port}" for port in taken]


async def ready(client: EngineClient, urls: list[str]) -> None:
    """Return once each engine answers."""
    async with asyncio.timeout(START_S):
        for url in urls:
            while True:
                try:
                    await client.health(url)
                    break
                except EngineError:
                    await asyncio.sleep(0.2)


def plain(services: Services, file: Path, scratch: Path, key: str) -> float:
    """Seconds of one upload and two downloads at once."""
    bucket = services.s3_bucket
    s3 = boto3.client(
        "s3",
        endpoint_url=services.s3_endpoint,
        aws_access_key_id=services.s3_access_key,
        aws_secret_access_key=services.s3_secret_key,
        region_name=services.s3_region,
    )
    began = time.perf_counter()
    s3.upload_file(str(file), bucket, key)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(lambda n: s3.download_file(bucket, key, str(scratch / f"copy-{n}")), range(2))
        )
    return time.perf_counter() - began


async def measure(rounds: int, stack: Stack, folder: Path) -> dict[str, Any]:
    """The best of each figure, in seconds."""
    services = stack.services
    store, scratch = ObjectStore(services), folder / "scratch"
    scratch.mkdir()
    store.prepare()
    SHAPE.architectures = ["LlamaForCausalLM"]
    SHAPE.save_pretrained(folder / "model")
    table = {"name": "bench", "steps": 1, "tasks": {"source": "s:s", "dataset": "d:d"}}
    config = RunConfig.parse(
        table | {"model": {"path": str(folder / "model"), "initial": "random"}}
    )
    policy = Policy.build(folder / "model", config, torch.device("cpu"))
    files: dict[str, bytes | Path] = {"config.json": folder / "model" / "config.json"}
    model = manifests.upload(store, f"models/{'0' * 64}", files, kind="model", sha256="0" * 64)
    told: dict[str, list[float]] = {
        "plain": [],
        "digest": [],
        "upload": [],
        "load": [],
        "publish": [],
        "probe": [],
    }
    client, size = EngineClient(), 0
    supervisor = Supervisor(folder / "pids")
    try:
        urls = engines(supervisor, services, folder / "engines", folder)
        await ready(client, urls)
        for number in range(rounds):
            with torch.no_grad():
                next(iter(policy.parameters().values())).add_(1e-3)
            tensor_files.write(scratch / "plain.safetensors", policy.weights())
            told["plain"].append(
                plain(services, scratch / "plain.safetensors", scratch, f"plain/{number}")
            )
            began = time.perf_counter()
            known = weights_digest(policy.weights())
            told["digest"].append(time.perf_counter() - began)
            began = time.perf_counter()
            probe = publishing.probe(policy, 512)
            probed = time.perf_counter()
            stored = publishing.upload(
                store,
                scratch,
                policy,
                f"weights/bench/{number}",
                model=model.manifest_key,
                probe=probe,
                sha256=known,
            )
            uploaded, size = time.perf_counter(), stored.bytes
            name = f"bench@{number}"
            await asyncio.gather(
                *(client.load(url, name, stored.manifest_key, known.hex()) for url in urls)
            )
            loaded = time.perf_counter()
            told["probe"].append(probed - began)
            told["upload"].append(uploaded - probed)
            told["load"].append(loaded - uploaded)
            told["publish"].append(loaded - began)
            await asyncio.gather(*(client.unload(url, name) for url in urls))
    finally:
        await client.aclose()
        supervisor.close()
    best = {f"{name}_s": min(seconds) for name, seconds in told.items()}
    return best | {
        "ratio": best["publish_s"] / best["plain_s"],
        "megabytes": size / 1e6,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Print the figures, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder:
        os.chmod(folder, 0o711)
        stack = Stack.up(Path(folder) / "state", environ={})
        try:
            result = asyncio.run(measure(options.rounds, stack, Path(folder)))
        finally:
            stack.down()
    for name, value in result.items():
        print(f"{name:14} {value:8.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
