"""A run rehearsed on the ledger alone: a trainer without torch, engines and workers without processes.

Workers are played by their transactions' effects, straight in SQL, so that the trainer's side can
be tested against every order of events.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from domain.config import RunConfig
from domain.rollouts import Task
from storage import checkpoints, plans, queue, runs, steps, tasks, versions
from storage.database import Ledger, Tx
from storage.plans import Planned, Waiting
from storage.runs import Run
from storage.tasks import HandedOver

ENGINE = "http://engine-0"


def configuration(**sections: Mapping[str, Any] | Any) -> RunConfig:
    """A small valid configuration; sections are merged over it, plain keys replace."""
    table: dict[str, Any] = {
        "name": "r1",
        "steps": 50,
        "tasks": {"source": "m:source", "dataset": "m:tasks", "batch_size": 2},
        "groups": {"size": 2, "timeout": 60.0},
        "schedule": {"order": "dataset", "stale_policy": "resubmit", "max_lag": 1},
        "model": {"tiny": {}},
        "trainer": {"width": 64, "rows": 4},
        "budget": {"max_generated_tokens": 32, "segment_tokens": 32},
    }
    for name, value in sections.items():
        table[name] = table.get(name, {}) | value if isinstance(value, Mapping) else value
    return RunConfig.parse(table)


def digest(text: object) -> bytes:
    """32 bytes that stand for some weights or manifest."""
    return sha256(repr(text).encode()).digest()


class Rehearsal:
    """One run with its trainer's epoch. Every method is one transaction or a few."""

    def __init__(self, ledger: Ledger, config: RunConfig, *, batches: int = 10_000, share: int = 0):
        self.ledger = ledger
        self.config = config
        self.run = config.name
        self.batches = batches  # of the data
        self.share = share
        self.epoch = 0

    # -- the trainer

    def begin(self, *, shares: int = 1) -> "Rehearsal":
        """Create the run, take it over, make checkpoint 0 and serve version 0."""
        self.ledger.call(runs.create, self.config, world={"model_manifest": "m"}, shares=shares)
        self.take_over()
        self.ledger.call(
            checkpoints.create_first,
            self.run,
            self.epoch,
            weights_sha256=digest(0),
            manifest_key=f"weights/{self.run}/0/x/manifest.json",
            weights_bytes=1,
            probe=None,
            prefix=f"checkpoints/{self.run}/0",
            manifest_sha256=digest("checkpoint 0"),
            bytes=1,
            data_position={"batch": 0},
            rng={},
            world={},
        )
        self.serve(0)
        return self

    def take_over(self, holder: str = "host:1", *, force: bool = True) -> int:
        self.epoch = self.ledger.call(runs.take_over, self.run, holder, lease_s=30, force=force)
        return self.epoch

    def now(self) -> Run:
        return self.ledger.call(runs.read, self.run)

    def serve(self, version: int) -> None:
        """Upload, publish and have the one engine acknowledge a version."""
        sha = self.value(
            "SELECT weights_sha256 FROM policy_versions WHERE run_id = %s AND version = %s",
            self.run,
            version,
        )
        self.record_weights(version)
        assert self.ledger.call(versions.publish, self.run, self.epoch, version)
        self.ledger.call(versions.see_engine, self.run, ENGINE, 1, 8, 3600.0)
        assert self.ledger.call(versions.acknowledge, self.run, ENGINE, 1, version, bytes(sha))
        assert self.ledger.call(versions.mark_served, self.run, version)

    def record_weights(self, version: int) -> None:
        """Say that a version's weights are in the object store."""
        self.ledger.call(
            versions.record_weights,
            self.run,
            self.epoch,
            version,
            manifest_key=f"weights/{self.run}/{version}/x/manifest.json",
            bytes=1,
            probe=None,
        )

    def register(self, batch: int) -> None:
        if batch >= self.batches:
            self.ledger.call(tasks.end_of_data, self.run, self.epoch, self.share, self.batches)
            return
        self.ledger.call(
            tasks.register_batch,
            self.run,
            self.epoch,
            self.share,
            batch,
            self.tasks(batch),
            {"batch": batch + 1},
        )

    def tasks(self, batch: int) -> list[Task]:
        return [Task(f"t{batch}.{i}", {"n": i}) for i in range(self.config.tasks.batch_size)]

    def hand_over(self) -> HandedOver:
        """Hand over until no batch is missing; the submissions of all calls together."""
        submitted = 0
        while True:
            done = self.ledger.call(tasks.hand_over, self.run, self.epoch, self.share)
            submitted += done.submitted
            if done.need_batch is None:
                return HandedOver(
                    submitted=submitted, need_batch=None, outstanding=done.outstanding
                )
            self.register(done.need_batch)

    def plan(self, step: int | None = None) -> Planned | Waiting:
        at = self.now().next_step if step is None else step
        return self.ledger.call(plans.plan, self.run, self.epoch, self.share, at)

    def planned(self) -> list[int]:
        """Plan the next step, which must be possible; its groups in training order."""
        plan = self.plan()
        assert isinstance(plan, Planned), plan
        return [row.group for row in plan.rows]

    def apply(self, step: int | None = None, *, updated: bool = True) -> int:
        at = self.now().next_step if step is None else step
        return self.ledger.call(
            steps.apply,
            self.run,
            self.epoch,
            at,
            updated=updated,
            weights_sha256=digest(("step", at)),
            cause=None if updated else "no usable gradient",
            metrics={"loss": 0.5},
            record={"updates": at},
        )

    def checkpoint(self, position: Mapping[str, Any] | None = None) -> bool:
        run = self.now()
        return self.ledger.call(
            checkpoints.record,
            self.run,
            self.epoch,
            step=run.next_step,
            version=run.version,
            prefix=f"checkpoints/{self.run}/{run.next_step}/{self.epoch}",
            manifest_sha256=digest(("checkpoint", run.next_step)),
            bytes=1,
            data_position={"batch": self.drawn()} if position is None else position,
            rng={"torch": 1},
            world={},
        )

    def train(self, count: int) -> None:
        """Train so many steps, each on the oldest groups, and serve each version."""
        for _ in range(count):
            self.hand_over()
            size = self.config.tasks.batch_size
            for group in [g for g, at in self.states().items() if at == "submitted"][:size]:
                self.complete(group)
            self.planned()
            self.serve(self.apply())
        self.hand_over()

    def drawn(self) -> int:
        return int(self.value("SELECT count(*) FROM task_batches WHERE run_id = %s", self.run))

    # -- workers and workflows

    def start(self, group: int, sample: int | None = None) -> None:
        """Start the queued attempts of a group (or of one sample) under the served version."""
        self.do(
            """
            UPDATE attempts SET state = 'running', fence = fence + 1, started_at = now(),
                pinned_version = (SELECT version FROM served s WHERE s.run_id = attempts.run_id)
            WHERE run_id = %s AND group_id = %s AND (%s::int IS NULL OR sample = %s)
                AND state = 'submitted'
            """,
            self.run,
            group,
            sample,
            sample,
        )

    def end(
        self,
        group: int,
        sample: int,
        *,
        reward: float | None = 1.0,
        status: str = "completed",
        lengths: Sequence[int] = (8,),
        member: bool = True,
        version: int | None = None,
    ) -> None:
        """Finish a running attempt of a sample."""
        self.do(
            """
            UPDATE attempts SET state = 'finished', status = %s, reward = %s, member = %s,
                truncation = CASE WHEN %s = 'truncated' THEN 'tokens' END, chain_lengths = %s,
                oldest_version = coalesce(%s, pinned_version),
                newest_version = coalesce(%s, pinned_version), finished_at = now()
            WHERE run_id = %s AND group_id = %s AND sample = %s AND state = 'running'
                AND cancel_cause IS NULL
            """,
            status,
            reward,
            member,
            status,
            list(lengths),
            version,
            version,
            self.run,
            group,
            sample,
        )

    def complete(
        self,
        group: int,
        *,
        lengths: Sequence[int] = (8,),
        part: int = 0,
        version: int | None = None,
    ) -> None:
        """Run every queued sample of a group to a good end and admit the group."""
        self.start(group)
        for row in self.rows(
            "SELECT sample FROM attempts WHERE run_id = %s AND group_id = %s AND state = 'running' "
            "AND cancel_cause IS NULL ORDER BY sample LIMIT %s",
            self.run,
            group,
            self.config.groups.size,
        ):
            self.end(group, row["sample"], lengths=lengths, version=version)
        self.admit(group, part=part)

    def admit(self, group: int, *, part: int = 0) -> None:
        def finish(tx: Tx) -> None:
            tx.execute(
                "SELECT 1 FROM groups WHERE run_id = %s AND group_id = %s FOR NO KEY UPDATE",
                (self.run, group),
            )
            queue.admit(tx, self.run, group, part)
            tx.execute(
                "UPDATE attempts SET cancel_cause = 'surplus' WHERE run_id = %s AND group_id = %s "
                "AND state IN ('submitted', 'running') AND cancel_cause IS NULL",
                (self.run, group),
            )
            tx.execute(
                "UPDATE groups SET state = 'complete' WHERE run_id = %s AND group_id = %s",
                (self.run, group),
            )

        self.ledger.call(finish)

    def admit_part(self, group: int, part: int) -> None:
        """Queue the members that have no part; the group goes on sampling."""
        self.ledger.call(queue.admit, self.run, group, part)

    def abandon(self, group: int, state: str = "abandoned") -> None:
        """End a submitted group without training."""
        self.do(
            "UPDATE attempts SET state = 'finished', status = 'cancelled', finished_at = now() "
            "WHERE run_id = %s AND group_id = %s AND state IN ('submitted', 'running')",
            self.run,
            group,
        )
        self.do(
            "UPDATE groups SET state = %s, closed_cause = 'max_attempts', closed_step = "
            "(SELECT next_step FROM runs r WHERE r.run_id = groups.run_id) "
            "WHERE run_id = %s AND group_id = %s",
            state,
            self.run,
            group,
        )

    # -- looking

    def do(self, query: str, *args: Any) -> None:
        with self.ledger.transaction() as tx:
            tx.execute(query, args)

    def rows(self, query: str, *args: Any) -> list[dict[str, Any]]:
        with self.ledger.transaction() as tx:
            return tx.execute(query, args).fetchall()

    def value(self, query: str, *args: Any) -> Any:
        (row,) = self.rows(query, *args)
        (value,) = row.values()
        return value

    def group(self, group: int) -> dict[str, Any]:
        (row,) = self.rows(
            "SELECT * FROM groups WHERE run_id = %s AND group_id = %s", self.run, group
        )
        return row

    def states(self) -> dict[int, str]:
        """Where each group is: its state, or queue, trained, cut."""
        return {
            row["group_id"]: row["place"]
            for row in self.rows(
                "SELECT group_id, place FROM group_place WHERE run_id = %s ORDER BY 1", self.run
            )
        }

    def commands(self, kind: str) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT key, payload FROM outbox WHERE run_id = %s AND kind = %s ORDER BY id",
            self.run,
            kind,
        )
