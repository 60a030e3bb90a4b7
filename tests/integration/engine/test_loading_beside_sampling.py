"""A load and the requests beside it: nobody waits for weights that are not the ones he samples."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine.weights
from activities.inference import EngineClient
from engine.weights import Loader
from tests.integration.engine.lab import GPT2, Weights, running_engine, sampling

STAGES = {"fetching": (Loader, "load"), "building": (engine.weights, "build")}
"""Where a load is held up: before anything is here, and when all that is left is to build it."""


class Gate:
    """A function that begins, and returns when it is let."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **more: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(30), "nobody opened the gate"
        return self._function(*args, **more)


@pytest.mark.parametrize("stage", STAGES)
async def test_requests_wait_for_no_load_neither_on_the_engine_that_loads_nor_on_another(
    client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    weights = [Weights.random(GPT2, seed) for seed in range(2)]
    folders = [tmp_path / "loads", tmp_path / "holds"]
    for folder in folders:
        folder.mkdir()
    with running_engine(folders[0]) as loads, running_engine(folders[1]) as holds:
        for one in (loads, holds):
            await one.serve(client, "run@0", weights[0])
        await holds.serve(client, "run@1", weights[1])
        owner, name = STAGES[stage]
        gate = Gate(getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda *args, **more: gate(*args, **more))
        loading = asyncio.create_task(loads.serve(client, "run@1", weights[1]))
        try:
            assert await asyncio.to_thread(gate.entered.wait, 10)
            async with asyncio.timeout(20):
                found = await asyncio.gather(
                    *(
                        client.generate(
                            one.url,
                            policy,
                            [1, 2, 3],
                            sampling(seed=n),
                            request_id=f"{policy}-{n}",
                            salt=policy,
                        )
                        for one, policy in (
                            (loads, "run@0"),
                            (holds, "run@0"),
                            (holds, "run@1"),
                        )
                        for n in range(4)
                    ),
                    # What the engine holds already is acknowledged without a load.
                    holds.serve(client, "run@1", weights[1]),
                )
            assert not loading.done()
            assert len(found) == 13
        finally:
            gate.opened.set()
        await loading
        await client.generate(
            loads.url, "run@1", [1, 2, 3], sampling(), request_id="after", salt="s"
        )
