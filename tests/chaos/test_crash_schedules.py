"""However often the trainer dies, a run ends as one that never did, on the same plans.

Each schedule ends with the data; then every step's digest is compared with an uncrashed trainer's,
no group was trained twice along the line of forks, nothing is owed, and the ledger's rules hold.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from domain.config import RunConfig
from domain.errors import Fenced
from storage import plans, runs, segments, tasks
from storage.database import Ledger
from tests.chaos.crash_world import Cluster
from tests.chaos.toy_trainer import Crash, Crashes, Model, Trainer
from tests.ledger_fixtures import check_invariants
from tests.rehearsal import configuration

SETTINGS: dict[str, dict[str, Any]] = {
    "dataset, admit 2 of 3, oversample": {
        "tasks": {"batch_size": 3},
        "groups": {"size": 2, "oversample": 1, "admit": 2},
        "schedule": {"order": "dataset", "stale_policy": "resubmit", "max_lag": 2},
        "checkpoint": {"every": 2},
    },
    "dataset, cut": {
        "groups": {"size": 2, "max_attempts": 2},
        "schedule": {"order": "dataset", "stale_policy": "resubmit", "max_empty_batches": 9},
        "trainer": {"overflow": "cut", "rows": 2, "width": 16},
        "budget": {"max_generated_tokens": 16, "segment_tokens": 16},
    },
    "deadline, wait": {
        "schedule": {"order": "deadline", "stale_policy": "wait", "max_lag": 2},
        "checkpoint": {"every": 3},
    },
    "deadline, wait, publish every second": {
        "schedule": {"order": "deadline", "stale_policy": "wait", "sync_every": 2, "max_lag": 2},
    },
    "admission, resubmit": {
        "schedule": {"order": "admission", "stale_policy": "resubmit"},
        "checkpoint": {"every": 2},
    },
    "carry over": {
        "groups": {
            "size": 3,
            "completion": {
                "mode": "deadline",
                "min_members": 2,
                "max_straggler_tokens": 3,
                "on_stragglers": "carry_over",
            },
        },
        "schedule": {
            "order": "admission",
            "stale_policy": "keep",
            "allow_unbounded_staleness": True,
        },
        "trainer": {"estimator": "batch"},
    },
}
BATCHES = 6


@dataclass
class Schedule:
    """Runs one schedule of crashes, closes and forks to the end of the data."""

    ledger: Ledger
    config: RunConfig
    crashes: Crashes
    rng: random.Random
    interruptions: float = 0.0

    def play(self) -> list[tuple[str, int]]:
        """Returns the line of `(run, step)` that the surviving weights come from."""
        cluster = Cluster(self.ledger, self.rng)
        store: dict[str, Any] = {}
        config = self.config
        zombie: tuple[str, int] | None = None
        while True:
            trainer = Trainer(self.ledger, cluster, store, config, self.crashes, BATCHES)
            try:
                trainer.start()
                if zombie is not None:
                    self.haunt(*zombie)
                ahead = trainer.now().next_step + self.rng.randint(1, 3)
                interrupted = self.rng.random() < self.interruptions
                trainer.train(ahead if interrupted else None)
                trainer.close()
                if not interrupted:
                    break
                if self.rng.random() < 0.5:
                    config = self.fork(trainer)
            except Crash:
                pass
            if trainer.epoch:
                zombie = (trainer.run, trainer.epoch)
            self.ledger.call(check_invariants)
        return self.line(config.name)

    def fork(self, trainer: Trainer) -> RunConfig:
        with self.ledger.transaction() as tx:
            durable = tx.execute(
                "SELECT step FROM checkpoints WHERE run_id = %s AND state = 'durable'",
                (trainer.run,),
            ).fetchall()
        name = trainer.fork(self.rng.choice([row["step"] for row in durable]))
        return self.ledger.call(runs.read, name).config

    def haunt(self, run: str, epoch: int) -> None:
        """A trainer that was thought dead wakes up and goes on where it was."""
        now = self.ledger.call(runs.read, run)
        if now.epoch == epoch:
            return
        for call in (
            lambda tx: plans.plan(tx, run, epoch, 0, now.next_step),
            lambda tx: tasks.hand_over(tx, run, epoch, 0),
            lambda tx: runs.close(tx, run, epoch, "closed"),
        ):
            with pytest.raises(Fenced):
                self.ledger.call(call)

    def line(self, name: str) -> list[tuple[str, int]]:
        line: list[tuple[str, int]] = []
        run: runs.Run | None = self.ledger.call(runs.read, name)
        end = run.next_step if run else 0
        while run is not None:
            line = [(run.id, step) for step in range(run.first_step, end)] + line
            end = run.first_step
            run = self.ledger.call(runs.read, run.parent) if run.parent else None
        return line


def check(ledger: Ledger, line: list[tuple[str, int]]) -> None:
    """Compare with an uncrashed trainer of the same plans."""
    model = Model.new()
    trained: list[tuple[int, int]] = []
    for run, step in line:
        plan = ledger.call(plans.read, run, step)
        assert plan is not None
        rows = [(row.group, row.part) for row in plan.rows]
        trained += rows
        updated = model.train(ledger.call(segments.members, run, rows) if rows else [])
        with ledger.transaction() as tx:
            booked = tx.execute(
                "SELECT updated, weights_sha256 FROM steps WHERE run_id = %s AND step = %s",
                (run, step),
            ).fetchone()
        assert booked == {"updated": updated, "weights_sha256": model.digest()}
    assert len(trained) == len(set(trained)), "a part was trained twice"
    last = line[-1][0]
    with ledger.transaction() as tx:
        balance = tx.execute("SELECT * FROM balance WHERE run_id = %s", (last,)).fetchone()
        surplus = tx.execute(
            "SELECT count(*) AS n FROM groups WHERE state = 'cancelled' "
            "AND closed_cause <> 'surplus'"
        ).fetchone()
    assert balance is not None
    assert balance["owed"] == 0, balance
    assert surplus == {"n": 0}


def schedule(ledger: Ledger, setting: str, seed: int, **crashes: Any) -> Schedule:
    rng = random.Random(f"{setting}/{seed}")
    config = configuration(**({"steps": 200} | SETTINGS[setting]))
    return Schedule(ledger, config, Crashes(random.Random(seed), **crashes), rng)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_crash_at_each_point_changes_nothing(ledger: Ledger, setting: str) -> None:
    played = schedule(ledger, setting, 0, each_once=True)
    played.interruptions = 0.3
    check(ledger, played.play())
    points = set(played.crashes.seen)
    assert points >= {
        "create_mid",
        "create_done",
        "create_uploaded",
        "first_mid",
        "first_done",
        "resume_mid",
        "resume_done",
        "uploaded_mid",
        "uploaded_done",
        "publish_mid",
        "publish_done",
        "served",
        "hand_mid",
        "hand_done",
        "register_mid",
        "register_done",
        "plan_start",
        "plan_mid",
        "plan_done",
        "mid_step",
        "optimizer",
        "apply_mid",
        "apply_done",
        "replay_mid",
        "replay_done",
        "checkpoint_uploaded",
        "checkpoint_mid",
        "checkpoint_done",
        "close_mid",
        "close_done",
    }
    assert played.crashes.crashed == len(points)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", SETTINGS)
def test_random_crashes_closes_and_forks_change_nothing(ledger: Ledger, setting: str) -> None:
    played = schedule(ledger, setting, 1, rate=0.02)
    played.interruptions = 0.5
    check(ledger, played.play())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_random_schedules_change_nothing(ledger: Ledger, setting: str, seed: int) -> None:
    played = schedule(ledger, setting, seed, rate=0.01 * (seed % 5))
    played.interruptions = 0.2 * (seed % 4)
    check(ledger, played.play())
