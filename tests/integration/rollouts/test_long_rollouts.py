"""Many long rollouts in one worker: memory stays bounded, heartbeats come, references only."""

import asyncio
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.inference import EngineClient
from domain.environments import Env, RolloutView
from domain.rollouts import Task
from domain.tools import Message
from rollbook.stack import ports
from tests.attempted import Worker, limited, with_engines

Make = Callable[..., Any]
ROOT = Path(__file__).parents[3]


class Long(Env):
    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        return None

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_256_rollouts_of_100k_tokens(make: Make) -> None:
    rollouts, tokens = 256, 100_000
    b = make(
        groups={"size": rollouts, "timeout": 3600},
        budget={"max_generated_tokens": tokens, "segment_tokens": 10_000},
        trainer={"width": 2 * tokens, "truncation": "mask"},
    )
    group = b.group()
    gaps: list[float] = []
    url = f"http://127.0.0.1:{ports.choose(0)}"
    stub = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.stub_engine", url, cwd=ROOT
    )
    try:
        with_engines(b, url)
        client = EngineClient()
        worker = Worker(b, client, Long())
        attempts = worker.attempts()
        before = psutil.Process().memory_info().rss
        last = time.monotonic()

        async def play(sample: int) -> Any:
            environment = limited(3600)
            environment.info = replace(
                environment.info, start_to_close_timeout=timedelta(seconds=3600)
            )
            return await environment.run(attempts.run_attempt, b.key(group, sample))

        async def watch() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(0.1)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        watching = asyncio.create_task(watch())
        refs = await asyncio.gather(*(play(sample) for sample in range(rollouts)))
        watching.cancel()
        await client.aclose()
    finally:
        stub.kill()
        await stub.wait()
    gc.collect()
    assert {(ref.tokens, ref.status, ref.cause) for ref in refs} == {
        (tokens, "truncated", "tokens")
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(f"peak {peak / 2**20:.0f} MiB over the start; longest gap {max(gaps):.2f} s")  # noqa: T201
    assert peak < 2 * 2**30
