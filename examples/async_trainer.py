"""The trainer as an asynchronous iterator, on a conversation of two turns, across its own death.

The model sees three digits, answers, is told how many positions were right, and answers again; it is
rewarded for the reversed digits at the end. What runs while the trainer trains keeps its version.

    python examples/async_trainer.py --die-after 4    # kill -9 of itself, in the middle of it all
    python examples/async_trainer.py                  # goes on with step 5
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from rollbook import (
    AdamW,
    AsyncTrainer,
    Budget,
    Env,
    GroupCentered,
    GroupCompletion,
    RolloutEngine,
    RolloutView,
    Task,
    TinyModel,
)

ALPHABET = "0123456789=?"


class SecondThought(Env):
    """Answer, hear how many digits were right, answer again."""

    recovery = "stateless"  # all its state is in the messages

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """Pose the problem."""
        return [{"role": "user", "content": f"{task.data['digits']}="}]

    async def on_turn(self, rollout: RolloutView) -> list[dict[str, Any]] | None:
        """After the first answer, say how many positions were right."""
        if rollout.turns == 2:
            return None
        return [{"role": "user", "content": f"?{round(3 * _right(rollout))}="}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        """Share of the positions that the last answer got right."""
        return _right(rollout)

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
        """What was said until then counts."""
        return _right(rollout)


def _right(rollout: RolloutView) -> float:
    said = str(rollout.messages[-1]["content"]) if rollout.turns else ""
    wanted = str(rollout.task.data["digits"])[::-1]
    return sum(a == b for a, b in zip(said[:3], wanted, strict=False)) / 3


def tasks() -> list[Task]:
    """All three-digit strings."""
    return [Task(f"{n:03d}", {"digits": f"{n:03d}"}) for n in range(1000)]


def trainer(state: Path, run: str = "second-thought") -> AsyncTrainer:
    """A tiny model from random weights; every setting that is not named is the default."""
    engine = RolloutEngine(
        TinyModel(alphabet=ALPHABET, dim=32, layers=1, heads=2, max_positions=32),
        env=SecondThought(),
        budget=Budget(max_turns=2, max_generated_tokens=10, segment_tokens=2, max_turn_tokens=5),
        sample_timeout=120.0,
    )
    return AsyncTrainer(
        engine=engine,
        optimizer=AdamW(lr=3e-3),
        completion=GroupCompletion(),
        advantage=GroupCentered(standardize=False),
        truncation="score",
        groups_per_step=4,
        group_size=4,
        max_staleness=2,
        width=32,
        rows=16,
        run=run,
        state=state,
    )


async def main(state: Path, steps: int, die_after: int | None) -> None:
    """Train, and tell each step."""
    async for step in trainer(state).run(tasks(), steps=steps):
        print(
            f"step {step.n}: version {step.model_step}, "
            f"{len(step.trajectories)} rollouts, reward {step.metrics['reward/mean']:.3f}, "
            f"oldest token {step.metrics.get('lag/max', 0):.0f} versions old, "
            f"slack {step.metrics['staleness/slack']:.0f}",
            flush=True,
        )
        if step.n == die_after:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path(".rollbook"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--die-after", type=int)
    given = parser.parse_args()
    asyncio.run(main(given.state, given.steps, given.die_after))
