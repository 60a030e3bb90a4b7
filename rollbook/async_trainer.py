"""`AsyncTrainer`: the built-in trainer as an asynchronous iterator, durable by its run name.

    engine = RolloutEngine("model", env=Calculator())
    trainer = AsyncTrainer(engine=engine, optimizer=1e-6, completion=GroupCompletion(), …, run="mine")
    async for step in trainer.run(tasks, steps=100):
        print(step.n, step.metrics["reward/mean"])

Everything is as with `rollbook run`: the same configuration, ledger and trainer, which runs in a
thread of this process. A process that dies is started again and goes on where the ledger stands.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from domain import sources
from domain.config import OWN_LOOP, RunConfig
from domain.data import TaskStream, as_tasks
from domain.errors import RunStopped
from domain.rollouts import Rollout, Task
from domain.services import Services
from rollbook import own_config, own_run, preflight
from rollbook.companions import Companions
from rollbook.connect import STATE
from rollbook.rollout_engine import RolloutEngine
from rollbook.settings import AdamW, Advantage, GroupCentered, GroupCompletion, Loss
from rollbook.trainer_thread import TrainerThread
from storage import cancelling, datasets, runs
from storage.database import Ledger

QUIET_S = 10.0
"""Seconds that a stop waits for cancelled rollouts; what is left ends with its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One trained step."""

    n: int
    """Batches completed, this one included."""
    model_step: int
    """The policy version after it: steps that changed the weights."""
    metrics: Mapping[str, float]
    trajectories: Sequence[Rollout]
    """What it trained, in training order."""


class AsyncTrainer:
    """Trains a policy on rollouts that keep running while it learns."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        optimizer: Any,
        completion: GroupCompletion,
        groups_per_step: int,
        group_size: int = 16,
        advantage: Advantage = GroupCentered(),  # noqa: B008 - frozen
        loss: Loss | Literal["ppo", "cispo", "gspo"] = Loss(),  # noqa: B008 - frozen
        max_staleness: int = 2,
        stale_policy: Literal["wait", "resubmit", "mask_span", "keep"] = "wait",
        allow_trajectory_loss: bool = False,
        allow_unbounded_staleness: bool = False,
        truncation: str = "mask",
        truncation_by_cause: Mapping[str, str] = {},
        order: Literal["deadline", "admission"] = "deadline",
        ahead: int = 1,
        sync_every: int = 1,
        minibatches: int = 1,
        width: int | None = None,
        rows: int = 8,
        checkpoint_every: int = 1,
        run: str,
        services: Services | None = None,
        state: str | Path = STATE,
        force: bool = False,
    ) -> None:
        """Check every setting; nothing is started.

        Args:
            engine: the policy and what it plays.
            optimizer: `AdamW`, a learning rate, or a `torch.optim.AdamW` for its hyperparameters.
            completion: when a group is ready.
            groups_per_step: groups that a step trains.
            group_size: rollouts of a group.
            advantage: what a reward is compared with.
            loss: the objective.
            max_staleness: trainer version minus that of a rollout's oldest token, at training.
            stale_policy: what happens to older ones.
            allow_trajectory_loss: acknowledges that parts of rollouts may be lost.
            allow_unbounded_staleness: acknowledges that tokens of any age train.
            truncation: of truncated rollouts: mask, score, zero or drop.
            truncation_by_cause: exceptions to it.
            order: which ready groups train first: those due soonest, or those complete first.
            ahead: batches sampled ahead of the one in training; 0 is synchronous.
            sync_every: publish when the served version is so far behind.
            minibatches: optimizer updates per step, over disjoint parts of its rows.
            width: tokens of a packed row; default the longest context.
            rows: packed rows of one micro-batch.
            checkpoint_every: steps between checkpoints.
            run: its name, under which everything is found again.
            services: addresses; None starts or joins the local stack in `state`.
            state: folder of the local stack, of caches and logs.
            force: take the run from a process that still holds it.

        Raises:
            ConfigError: names the setting, the value and the remedy.
            TypeError: the optimizer is none that can be computed.
        """
        self._engine, self._services = engine, services
        self._state, self._force = Path(state), force
        self.name = run
        longest = engine.budget.max_context_tokens if width is None else width
        top_k = engine.filtered
        self._tables: dict[str, Any] = {
            "name": run,
            "seed": engine.seed,
            "root": str(engine.located.root),
            "tasks": {
                "source": engine.located.reference or OWN_LOOP,
                "dataset": OWN_LOOP,
                "batch_size": groups_per_step,
                "environment": own_config.environment_of(run),
            },
            "groups": {
                "size": group_size,
                "completion": asdict(completion),
                **engine.timeouts,
            },
            "schedule": {
                "order": order,
                "ahead": ahead,
                "sync_every": sync_every,
                "max_lag": max_staleness,
                "stale_policy": stale_policy,
                "allow_trajectory_loss": allow_trajectory_loss,
                "allow_unbounded_staleness": allow_unbounded_staleness,
            },
            "sampling": engine.sampling,
            "budget": engine.budget.within(width),
            "model": engine.model,
            "trainer": {
                "width": longest,
                "rows": rows,
                "truncation": truncation,
                "truncation_by_cause": dict(truncation_by_cause),
                "minibatches": minibatches,
                "support_capacity": top_k * longest or None,
                **advantage.table(),
                **(Loss(kind=loss) if isinstance(loss, str) else loss).table(),
                **AdamW.of(optimizer).table(),
            },
            "checkpoint": {"every": checkpoint_every},
            # A version per step of the bound, and one that loads.
            "engine": {"max_resident": max(4, max_staleness + 2)},
        }
        sources.check(engine.located.source, self._configure(1))

    async def run(self, dataset: Any, *, steps: int) -> AsyncGenerator[Step, None]:
        """Train up to `steps` steps in all, yielding those that this process trained.

        The trainer waits for the caller between two steps. Leaving the loop early checkpoints and
        closes the run (`contextlib.aclosing` makes that immediate); the next `run` with the same
        arguments goes on, as after a crash.

        Args:
            dataset: tasks or mappings, a JSONL file, or `module:name`. It repeats, shuffled anew
                each epoch.
            steps: of the whole run; part of its settings.

        Raises:
            ConfigError: the settings, the data or the model are wrong, or not those of the run.
            RunHeld: another process trains it.
            RunStopped: it failed; says why.
        """
        config = self._configure(steps)
        stream = TaskStream(
            tasks=self._read(dataset),
            batch_size=config.tasks.batch_size,
            seed=config.seed,
            shuffle=config.tasks.shuffle,
        )
        await asyncio.to_thread(preflight.check_parts, config, self._engine.located.source, stream)
        companions = await asyncio.to_thread(Companions, self._services, self._state)
        try:
            recorded = await asyncio.to_thread(own_run.create, companions.services, config)
            own_config.check_unchanged(recorded, config)
            preflight.check_engine(recorded, own=not companions.services.engines)
            await asyncio.to_thread(companions.start, recorded, self._engine.located)
            trainer = TrainerThread(
                self.name,
                companions.services,
                stream,
                watch=companions.check,
                force=self._force,
            )
            trainer.start()
            try:
                while (trained := await trainer.next()) is not None:
                    yield Step(
                        n=trained.step + 1,
                        model_step=trained.version,
                        metrics=trained.metrics,
                        trajectories=trained.rollouts,
                    )
            finally:
                await trainer.stop()
                await asyncio.to_thread(_settle, companions.services, self.name)
            if trainer.state == "failed":
                raise RunStopped(await asyncio.to_thread(_failure, companions.services, self.name))
        finally:
            await asyncio.to_thread(companions.close)

    def _configure(self, steps: int) -> RunConfig:
        return RunConfig.parse(
            self._tables | {"steps": steps}, origin=f"AsyncTrainer({self.name!r})"
        )

    def _read(self, dataset: Any) -> list[Task]:
        if isinstance(dataset, str | Path):
            return datasets.read_tasks(str(dataset), root=Path.cwd())
        return as_tasks(enumerate(dataset), origin="dataset")


def _settle(services: Services, run: str) -> None:
    """Give what a close cancelled a moment to notice: engines are idle then."""
    ledger = Ledger.open(services.database_url, pool=1, application="rollbook trainer")
    try:
        give_up = time.monotonic() + QUIET_S
        while ledger.call(cancelling.in_flight, run) and time.monotonic() < give_up:
            time.sleep(0.1)
    finally:
        ledger.close()


def _failure(services: Services, run: str) -> str:
    ledger = Ledger.open(services.database_url, pool=1, application="rollbook trainer")
    try:
        return f"run {run} failed: {ledger.call(runs.read, run).failure}"
    finally:
        ledger.close()
