"""Held-out rollouts of one task are different draws: nothing else makes `samples` worth its cost."""

from pathlib import Path

from activities.album import Album
from activities.held_out import Asked, HeldOut
from activities.inference import EngineClient
from domain.config import Evaluation
from domain.messages import AttemptIn
from domain.rollouts import Task
from tests.scripted import config, printable
from tests.stub_engine import stub_engine

NO_IMAGES = Album(None, None)  # type: ignore[arg-type]


async def test_each_held_out_rollout_has_a_seed_of_its_own(tmp_path: Path) -> None:
    chat = printable(tmp_path)
    evaluation = Evaluation(dataset="held:out", samples=2, temperature=1.0)
    run = config().model_copy(update={"evaluation": evaluation})
    async with stub_engine() as stub:
        engines = EngineClient()
        asked = Asked(engines=engines, config=run, version=1, chat=chat, album=NO_IMAGES)
        try:
            for group, (task, sample) in enumerate((("a", 0), ("a", 1), ("b", 0))):
                which = AttemptIn(run="r", group=group, sample=sample, attempt=1)
                rollout = HeldOut(asked, stub.url, which, Task(task, {}), None)
                for _ in range(2):
                    await rollout.sample([5, 6])
        finally:
            await engines.aclose()
    seeds = [request["sampling_params"]["seed"] for request in stub.requests]
    assert len(set(seeds)) == 6
    assert all(request["priority"] > 0 for request in stub.requests)  # behind what is trained
