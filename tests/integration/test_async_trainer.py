"""`AsyncTrainer` on the real parts: left early, taken up again, killed, refused when changed."""

import os
import secrets
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from domain.environments import PromptSource
from domain.errors import ConfigError
from domain.rollouts import Task
from domain.services import Services
from rollbook import AdamW, AsyncTrainer, Budget, GroupCompletion, RolloutEngine, Step, TinyModel
from storage import runs
from storage.database import Ledger, upgrade
from storage.objects import ObjectStore
from tests.ledger_fixtures import check_invariants

ROOT = Path(__file__).resolve().parents[2]
TASKS = [{"prompt": f"{n}="} for n in range(10)]


def reward(text: str, task: Task) -> float:
    return text.count("7") / 4


def trainer(run: str, services: Services, state: Path, **settings: Any) -> AsyncTrainer:
    engine = RolloutEngine(
        TinyModel(dim=16, layers=1, heads=2, max_positions=16),
        env=PromptSource(reward),
        budget=Budget(max_generated_tokens=4, segment_tokens=2),
        sample_timeout=60.0,
    )
    given: dict[str, Any] = {
        "engine": engine,
        "optimizer": AdamW(lr=1e-3),
        "completion": GroupCompletion(),
        "truncation": "score",
        "groups_per_step": 2,
        "group_size": 4,
        "width": 16,
        "run": run,
        "services": services,
        "state": state,
    }
    return AsyncTrainer(**(given | settings))


@pytest.mark.timeout(300)
async def test_a_run_that_was_left_goes_on_where_it_stood(
    services: Services, tmp_path: Path
) -> None:
    upgrade(services.database_url)
    ObjectStore(services).prepare()
    run = f"a{secrets.token_hex(4)}"
    first: list[Step] = []
    async with aclosing(trainer(run, services, tmp_path).run(TASKS, steps=4)) as steps:
        async for step in steps:
            first.append(step)
            if step.n == 2:
                break
    ledger = Ledger.open(services.database_url, pool=1, application="tests")
    left = ledger.call(runs.read, run)
    assert (left.state, left.next_step, left.durable_step) == ("closed", 2, 2)

    with pytest.raises(ConfigError, match=r"trainer.lr = 0.001, now 0.5"):
        async for _ in trainer(run, services, tmp_path, optimizer=0.5).run(TASKS, steps=4):
            pass
    # Another trainer has it, as far as anyone knows, and for long.
    ledger.call(runs.take_over, run, "elsewhere:1", lease_s=600.0, force=True)
    forced = trainer(run, services, tmp_path, force=True)
    rest = [step async for step in forced.run(TASKS, steps=4)]
    assert [step.n for step in [*first, *rest]] == [1, 2, 3, 4]
    assert [len(step.trajectories) for step in rest] == [8, 8]
    assert rest[-1].model_step >= first[-1].model_step
    assert "sampling/cached_prompt_fraction" in rest[-1].metrics
    assert "staleness/span_age_p99" in rest[-1].metrics
    assert ledger.call(runs.read, run).state == "finished"
    ledger.call(check_invariants)
    ledger.close()
    assert [step async for step in trainer(run, services, tmp_path).run(TASKS, steps=4)] == []


@pytest.mark.slow
def test_the_example_dies_by_kill_9_and_goes_on(state_folder: Path) -> None:
    def example(*arguments: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            [
                *(sys.executable, "examples/async_trainer.py", "--steps", "5", *arguments),
                *("--state", str(state_folder / "example")),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, [w for w in done.stdout.splitlines() if w.startswith("step ")]

    code, before = example("--die-after", "2")
    assert code == -signal.SIGKILL
    code, after = example()
    assert code == 0
    assert [line.split(":")[0] for line in before + after] == [f"step {n}" for n in range(1, 6)]
