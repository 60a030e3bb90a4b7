"""Random schedules of deaths over a whole run: whatever dies when, the run ends as it must.

The toy trainer's schedules (`test_crash_schedules.py`) explore more; these are the real processes on
a real Postgres, Temporal and object store.
"""

import random
import signal

import pytest

from domain.failpoints import POINTS, ROLLOUT_POINTS
from tests.chaos.stage import Stage

STEPS = 8
ANYWHERE = ("engine", "workflows", "ledger", "rollouts", "trainer")
EARLY_OR_LATE = {"c_uploaded", "c_row", "c_served", "close_mid", "close_done", "plan_reopen"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "ranks"), [*((seed, 1) for seed in range(30)), *((seed, 2) for seed in range(30, 38))]
)
def test_whatever_dies_when_the_run_ends_as_it_must(stage: Stage, seed: int, ranks: int) -> None:
    dice = random.Random(seed)
    stage.begin(
        trainer={"ranks": ranks, "parallel": "fsdp" if ranks > 1 and seed % 2 else "ddp"},
        steps=STEPS,
        checkpoint={"every": dice.choice([1, 2, 3])},
        tasks={
            "source": f"walk:{dice.choice(['snapshot', 'stateless', 'drop'])}",
            "batch_size": 2 // ranks,
        },
        schedule={"order": dice.choice(["dataset", "deadline", "admission"])},
        groups={"oversample": dice.choice([0, 1])},
    )
    stage.pause(0.1)
    stage.start("engine", "workflows", "ledger", "rollouts")
    points = sorted(set(POINTS) - EARLY_OR_LATE)
    for _ in range(dice.randint(2, 5)):
        if stage.found().next_step >= STEPS - 2:
            break
        deed = dice.random()
        if deed < 0.4:
            # A point may need what the schedule has not: then the run ends instead.
            stage.crash("trainer", dice.choice(points), or_end=True)
        elif deed < 0.6:
            stage.run_trainer()
            stage.until_rollouts_run()
            stage.stop("rollouts")
            stage.crash("rollouts", f"{dice.choice(sorted(ROLLOUT_POINTS))}:{dice.randint(1, 3)}")
            stage.start("rollouts")
        elif deed < 0.9:
            stage.run_trainer()
            stage.until_rollouts_run()
            stage.kill(dice.choice(ANYWHERE))
        else:
            stage.run_trainer()
            stage.until_rollouts_run()
            pid = stage.signal(dice.choice(ANYWHERE[1:4]), signal.SIGSTOP)
            stage.rest(dice.uniform(1, 5))
            stage.wake(pid)
    stage.run_trainer()
    stage.finish()
    stage.check()
