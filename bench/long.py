"""256 rollouts of 100,000 tokens each at once: memory, history, and how late a heartbeat gets.

    python -m bench.long [--groups 32] [--tokens 100000] [--segment 10000]

Groups of 8 over real Temporal, Postgres and worker processes; the engine answers at once with as
many tokens as asked for, so that all answers come together. Limits: the workflow worker under
300 MB, the history of a group under 64 KB, the event loop of the rollout worker never busy for a
second. `busy` is the CPU time that the loop's thread took between two turns, which neighbours on
the machine do not change; `gap` the time that passed.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from temporalio.client import Client

from bench import orchestration
from bench.orchestration import SIZE
from domain.config import RunConfig
from domain.environments import Env, RolloutView
from domain.rollouts import Task
from domain.services import Services
from domain.tools import Message
from rollbook import workers
from rollbook.stack import ports
from rollbook.stack.stack import Stack
from storage import tasks
from storage.database import Ledger, Tx, upgrade

ENVIRONMENT = "long"
TURN_S = 0.02


class Long(Env):
    """Talks until its budget is used up."""

    async def reset(self, task: Task) -> list[Message]:
        """One word."""
        return [{"role": "user", "content": "5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        """Nothing to add."""
        return None

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        """Worth it."""
        return 1.0


source = Long()


async def generate(request: Request) -> Response:
    """As many ids as asked for. Nothing is parsed: the engine must not be what is waited for."""
    body = await request.body()
    asked, version = (re.search(field, body) for field in (rb'"max_tokens":(\d+)', rb'@(\d+)"'))
    assert asked is not None
    assert version is not None
    return Response(answer(int(asked[1]), int(version[1])), media_type="application/json")


@cache
def answer(tokens: int, version: int) -> bytes:
    """The engine's answer to every request alike."""
    ids = [n % 10 for n in range(tokens)]
    choice = {
        "finish_reason": "length",
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
        "weight_versions": [{"version": str(version), "start": 0, "end": tokens}],
        "kv_version": version,
    }
    return json.dumps({"choices": [choice]}).encode()


async def health(_: Request) -> Response:
    """Alive."""
    body = {"incarnation": 1, "max_resident": 8, "policies": {}, "running": 0, "waiting": 0}
    return Response(json.dumps(body), media_type="application/json")


def serve_engine(port: int) -> None:
    """The engine's process."""
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", generate, methods=["POST"]),
            Route("/health", health),
        ]
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")


def serve_rollouts(
    services: Services, models: Path, gap: "Synchronized[float]", busy: "Synchronized[float]"
) -> None:
    """A rollout worker that watches its own event loop."""

    async def watch() -> None:
        while True:
            passed, used = time.monotonic(), time.thread_time()
            await asyncio.sleep(TURN_S)
            gap.value = max(gap.value, time.monotonic() - passed - TURN_S)
            busy.value = max(busy.value, time.thread_time() - used)

    async def work() -> None:
        watching = asyncio.create_task(watch())
        await workers.run_worker("rollouts", services, environments=(ENVIRONMENT,), cache=models)
        watching.cancel()

    logging.basicConfig(level=logging.WARNING)
    asyncio.run(work())


def serve(kind: workers.Kind, services: Services) -> None:
    """A workflow or ledger worker."""
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(workers.run_worker(kind, services))


def config(groups: int, tokens: int, segment: int) -> RunConfig:
    """One batch of long rollouts."""
    return RunConfig.parse(
        {
            "name": f"long-{secrets.token_hex(4)}",
            "steps": 1,
            "tasks": {
                "source": "bench.long:source",
                "dataset": "bench.long:source",
                "batch_size": groups,
                "environment": ENVIRONMENT,
            },
            "groups": {"size": SIZE},
            "schedule": {"order": "dataset", "ahead": 0, "max_lag": 0},
            "budget": {
                "max_generated_tokens": tokens,
                "max_context_tokens": 2 * tokens,
                "segment_tokens": segment,
            },
            "model": {"tiny": {"max_positions": 2 * tokens}},
            "trainer": {"width": 2 * tokens, "rows": SIZE * groups, "truncation": "mask"},
            "root": str(Path(__file__).parents[1]),
        }
    )


@dataclass
class Bench:
    """What both batches use."""

    client: Client
    ledger: Ledger
    model: str
    engine: str
    pids: dict[str, int]

    async def play(self, run: RunConfig) -> dict[str, Any]:
        """Play one batch; what the workers weighed at most, and the longest history."""
        groups = run.tasks.batch_size
        epoch = await asyncio.to_thread(
            orchestration.create, self.ledger, run, self.model, engine=self.engine
        )
        began = time.perf_counter()
        handed = await self.ledger.run(tasks.hand_over, run.name, epoch, 0)
        if handed.submitted != groups:
            raise RuntimeError(f"{handed.submitted} groups were handed over, not {groups}")
        peaks = dict.fromkeys(self.pids, 0.0)

        def complete(tx: Tx) -> list[str]:
            rows = tx.execute(
                "SELECT workflow_id FROM groups WHERE run_id = %s AND state = 'complete'",
                (run.name,),
            )
            return [row["workflow_id"] for row in rows]

        while len(done := await self.ledger.run(complete)) < groups:
            for name, pid in self.pids.items():
                peaks[name] = max(peaks[name], psutil.Process(pid).memory_info().rss / 1e6)
            await asyncio.sleep(0.2)
        seconds = time.perf_counter() - began
        described = [await self.client.get_workflow_handle(name).describe() for name in done]
        sizes = [
            d.raw_description.workflow_execution_info.history_size_bytes / 1e3 for d in described
        ]
        return {"seconds": seconds, "rss_mb": peaks, "history_kb": max(sizes)}


async def measure(
    services: Services,
    chosen: argparse.Namespace,
    engine: str,
    pids: dict[str, int],
    worst: "Sequence[Synchronized[float]]",
) -> dict[str, Any]:
    """A short batch, in which the workers load what they need, then the long one."""
    client = await workers.connect(services)
    ledger = Ledger.open(services.database_url, pool=2, application="bench")
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as folder:
        model = await asyncio.to_thread(orchestration.store_model, services, Path(folder))
    bench = Bench(client, ledger, model, engine, pids)
    await bench.play(config(1, 100, 100))
    for value in worst:
        value.value = 0.0
    figures = await bench.play(config(chosen.groups, chosen.tokens, chosen.segment))
    ledger.close()
    return figures


def main() -> None:
    """Start everything, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--segment", type=int, default=10_000)
    chosen = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    gap, busy = context.Value("d", 0.0), context.Value("d", 0.0)
    state = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    state.chmod(0o711)
    port = ports.choose(0)
    engine = f"http://127.0.0.1:{port}"
    try:
        with Stack.up(state, environ={}) as stack:
            upgrade(stack.services.database_url)
            services = stack.services
            with orchestration.processes(
                {
                    "engine": (serve_engine, (port,)),
                    "rollouts": (serve_rollouts, (services, state / "cache", gap, busy)),
                    "workflows": (serve, ("workflows", services)),
                    "ledger": (serve, ("ledger", services)),
                }
            ) as pids:
                figures = asyncio.run(measure(services, chosen, engine, pids, (gap, busy)))
    finally:
        shutil.rmtree(state, ignore_errors=True)
    figures |= {"gap_s": gap.value, "busy_s": busy.value}
    print(f"{chosen.groups * SIZE} rollouts of {chosen.tokens} tokens: {figures['seconds']:.0f} s")
    for name, peak in figures["rss_mb"].items():
        print(f"  {name:10} at most {peak:6.0f} MB RSS")
    print(f"  longest history of a group {figures['history_kb']:.1f} KB")
    print(f"  rollout worker's event loop: busy {busy.value:.2f} s, gap {gap.value:.2f} s at most")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
