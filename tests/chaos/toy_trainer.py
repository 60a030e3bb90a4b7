"""A toy trainer on a real ledger, which may die anywhere.

Sixteen float64 weights whose update depends on every token byte, on their order and on a stateful
random generator, so that any lost, repeated or reordered group shows in the digest.
"""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from domain.config import RunConfig
from domain.rollouts import Rollout, Task
from storage import checkpoints, fork, plans, runs, segments, steps, tasks, versions
from storage.database import Ledger, Tx
from storage.plans import Planned, Waiting
from tests.chaos.crash_world import Cluster

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 3000  # polls without progress that count as a hang


class Crash(Exception):
    """The trainer's process ends here."""


@dataclass
class Crashes:
    """Decides where the trainer dies: by chance, or at each point once."""

    rng: random.Random
    rate: float = 0.0
    each_once: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    crashed: int = 0

    def visit(self, point: str) -> None:
        first = point not in self.seen
        self.seen[point] = self.seen.get(point, 0) + 1
        if (self.each_once and first) or self.rng.random() < self.rate:
            self.crashed += 1
            raise Crash(point)


@dataclass
class Model:
    """The trainer's whole state."""

    weights: np.ndarray[Any, np.dtype[np.float64]]
    rng: np.random.Generator

    @classmethod
    def new(cls) -> "Model":
        rng = np.random.default_rng(7)
        return cls(rng.standard_normal(16), rng)

    def digest(self) -> bytes:
        return sha256(self.weights.tobytes()).digest()

    def train(self, batch: Sequence[Sequence[Rollout]]) -> bool:
        """Update on a step's groups, in order; False if they hold no usable gradient."""
        noise = self.rng.standard_normal(16)
        if all(len({r.reward for r in group}) < 2 for group in batch):
            return False
        for group in batch:
            for rollout in group:
                for segment in rollout.segments:
                    for token, logprob in zip(segment.sampled_ids, segment.logprobs, strict=True):
                        self.weights = np.tanh(
                            self.weights * 1.01 + noise * float(logprob) + int(token)
                        )
        return True


class Trainer:
    """One trainer process: restores, replays, and trains until the run ends or it crashes."""

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        store: dict[str, Any],
        config: RunConfig,
        crashes: Crashes,
        batches: int,
    ):
        self.ledger = ledger
        self.cluster = cluster
        self.store = store
        self.config = config
        self.run = config.name
        self.crashes = crashes
        self.batches = batches
        self.epoch = 0
        self.model = Model.new()
        self.position = 0

    def tx(
        self, name: str, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """One transaction, in the middle and at the end of which the process may die."""
        with self.ledger.transaction() as tx:
            answer = fn(tx, *args, **kwargs)
            self.crashes.visit(f"{name}_mid")
        self.crashes.visit(f"{name}_done")
        return answer

    def now(self) -> runs.Run:
        return self.ledger.call(runs.read, self.run)

    def start(self) -> None:
        """Create the run if need be, take it over, restore the newest checkpoint and replay."""
        with self.ledger.transaction() as tx:
            known = tx.execute("SELECT 1 FROM runs WHERE run_id = %s", (self.run,)).fetchone()
        if known is None:
            self.tx("create", runs.create, self.config, world={})
        self.epoch = self.tx("resume", runs.take_over, self.run, "t", lease_s=30, force=True)
        if self.now().state == "creating":
            self.crashes.visit("create_uploaded")
            self.tx("first", checkpoints.create_first, self.run, self.epoch, **self.first())
        found = self.ledger.call(checkpoints.newest, self.run)
        self.model = deepcopy(self.store[found.prefix])
        self.position = found.data_position["batch"]
        for step in range(found.step, self.now().next_step):
            plan = self.ledger.call(plans.read, self.run, step)
            assert plan is not None
            updated = self.compute(plan)
            self.tx(
                "replay",
                steps.verify_replay,
                self.run,
                self.epoch,
                step,
                updated=updated,
                weights_sha256=self.model.digest(),
            )

    def first(self) -> dict[str, Any]:
        model = Model.new()
        self.store[f"{self.run}/0"] = model
        return {
            "weights_sha256": model.digest(),
            "manifest_key": "w0",
            "weights_bytes": 1,
            "probe": None,
            "prefix": f"{self.run}/0",
            "manifest_sha256": model.digest(),
            "bytes": 1,
            "data_position": {"batch": 0},
            "rng": {},
            "world": {},
        }

    def train(self, until: int | None = None) -> None:
        """Poll, plan, compute, apply and checkpoint until the run ends, or step `until` is next."""
        polls = 0
        while until is None or self.now().next_step < until:
            polls += 1
            assert polls < PATIENCE, f"{self.run} hangs at step {self.now().next_step}"
            self.publish()
            self.hand_over()
            step = self.now().next_step
            self.crashes.visit("plan_start")
            plan = self.tx("plan", plans.plan, self.run, self.epoch, 0, step)
            if isinstance(plan, Waiting):
                if plan.kind == "end":
                    return
                for _ in range(4):
                    self.cluster.act()
                continue
            polls = 0
            self.crashes.visit("mid_step")
            updated = self.compute(plan)
            self.crashes.visit("optimizer")
            self.tx(
                "apply",
                steps.apply,
                self.run,
                self.epoch,
                step,
                updated=updated,
                weights_sha256=self.model.digest(),
                cause=None if updated else "no usable gradient" if plan.rows else "empty",
                metrics={},
                record={},
            )
            if (step + 1) % self.config.checkpoint.every == 0:
                self.checkpoint()

    def publish(self) -> None:
        run = self.now()
        served = self.ledger.call(versions.served, self.run)
        if served is not None and run.version - served < self.config.schedule.sync_every:
            return
        self.tx(
            "uploaded",
            versions.record_weights,
            self.run,
            self.epoch,
            run.version,
            manifest_key=f"w{run.version}",
            bytes=1,
            probe=None,
        )
        self.tx("publish", versions.publish, self.run, self.epoch, run.version)
        while self.ledger.call(versions.state, self.run, run.version) != "served":
            self.cluster.act()
        self.crashes.visit("served")

    def hand_over(self) -> None:
        while True:
            done = self.tx("hand", tasks.hand_over, self.run, self.epoch, 0)
            if done.need_batch is None:
                return
            # A restored position lags behind: what the ledger has already is drawn again, and must
            # be the same.
            for batch in range(self.position, done.need_batch + 1):
                self.register(batch)
            self.position = done.need_batch + (done.need_batch < self.batches)

    def register(self, batch: int) -> None:
        if batch >= self.batches:
            self.tx("end", tasks.end_of_data, self.run, self.epoch, 0, self.batches)
            return
        size = self.config.tasks.batch_size - (batch == self.batches - 1)  # a short last batch
        drawn = [Task(f"t{batch}.{i}", {"n": i}) for i in range(size)]
        self.tx(
            "register",
            tasks.register_batch,
            self.run,
            self.epoch,
            0,
            batch,
            drawn,
            {"batch": batch + 1},
        )

    def compute(self, plan: Planned) -> bool:
        rows = [(row.group, row.part) for row in plan.rows]
        batch = self.ledger.call(segments.members, self.run, rows) if rows else []
        return self.model.train(batch)

    def checkpoint(self) -> None:
        run = self.now()
        prefix = f"{self.run}/{run.next_step}/{self.epoch}"
        self.store[prefix] = deepcopy(self.model)
        self.crashes.visit("checkpoint_uploaded")
        self.tx(
            "checkpoint",
            checkpoints.record,
            self.run,
            self.epoch,
            step=run.next_step,
            version=run.version,
            prefix=prefix,
            manifest_sha256=self.model.digest(),
            bytes=1,
            data_position={"batch": self.position},
            rng={},
            world={},
        )

    def close(self) -> None:
        self.checkpoint()
        self.tx("close", runs.close, self.run, self.epoch, "closed")

    def fork(self, step: int) -> str:
        return self.tx("fork", fork.fork, self.run, self.epoch, step)
