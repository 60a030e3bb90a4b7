"""Held-out rollouts of one task are different draws: nothing else makes `samples` worth its cost."""

from pathlib import Path

from activities.album import Album
from activities.inference import EngineClient
from domain.config import Evaluation
from rollbook.evaluation import Recorder
from tests.scripted import config, printable
from tests.stub_engine import stub_engine

NO_IMAGES = Album(None, None)  # type: ignore[arg-type]


async def test_each_held_out_rollout_has_a_seed_of_its_own(tmp_path: Path) -> None:
    chat = printable(tmp_path)
    evaluation = Evaluation(dataset="held:out", samples=2, temperature=1.0)
    run = config().model_copy(update={"evaluation": evaluation})
    async with stub_engine() as stub:
        engines = EngineClient()
        try:
            for name in ("a/0", "a/1", "b/0"):
                recorder = Recorder(engines, stub.url, run, 1, chat, NO_IMAGES, name, [])
                for _ in range(2):
                    await recorder.sample([5, 6])
        finally:
            await engines.aclose()
    seeds = [request["sampling_params"]["seed"] for request in stub.requests]
    assert len(set(seeds)) == 6


async def test_trained_rollouts_come_before_held_out_ones(tmp_path: Path) -> None:
    run = config().model_copy(update={"evaluation": Evaluation(dataset="held:out")})
    async with stub_engine() as stub:
        engines = EngineClient()
        try:
            recorder = Recorder(
                engines, stub.url, run, 1, printable(tmp_path), NO_IMAGES, "a/0", []
            )
            await recorder.sample([5, 6])
        finally:
            await engines.aclose()
    assert stub.requests[0]["priority"] > 0
