"""The trainer process: plan, compute, apply, checkpoint, publish, until the run ends.

    CREATE | restore + REPLAY
    loop:  PUBLISH if due and wait until served
           HANDOVER and PLAN at every poll
           COMPUTE → APPLY → CHECKPOINT every K steps
    CLOSE  on SIGTERM, at the end, on failure

A step's groups are fixed by PLAN before any compute, and APPLY records the digest of the weights it
made, so the process may die anywhere: the next one restores the newest checkpoint, recomputes the
steps since, compares every digest, publishes, and only then hands over new work. Every transaction
checks the fencing epoch; a process that lost its run ends with `Fenced` and has changed nothing.
"""

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from domain import failpoints
from domain.config import Services
from domain.errors import ConfigError, Fenced, RollbookError, RunHeld
from storage import checkpoints, datasets, records, runs, steps, versions
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from storage.runs import Run
from storage.steps import Planned
from trainer import checkpoint, determinism
from trainer.consumer import Consumer, End
from trainer.creation import Workshop
from trainer.drift import DriftGuard
from trainer.lease import LEASE_S, Lease
from trainer.model import weights_digest
from trainer.publishing import Publisher
from trainer.update import Learner, Outcome
from trainer.waiting import Stopped, Waits

PATIENCE_S = 600.0

log = logging.getLogger(__name__)


def run(
    run: str,
    services: Services,
    *,
    holder: str,
    force: bool = False,
    stop: Callable[[], bool] = lambda: False,
    lease_s: float = LEASE_S,
    patience_s: float = PATIENCE_S,
) -> str:
    """Train a run of the ledger until it ends, is told to stop, or fails.

    Args:
        run: its name.
        services: Postgres and the object store.
        holder: who this is, as `host:pid`, for people and to recognise a dead holder.
        force: take the run from a holder that is alive.
        stop: asked at every poll; True ends the process with a checkpoint.
        lease_s: how long others must wait after this process died.
        patience_s: seconds for which an outage of Postgres, the store or the engines only stalls.

    Returns:
        the run's state: `finished`, `closed`, or `failed` with the cause in the ledger.

    Raises:
        Fenced: another trainer has taken over.
        RunHeld: a live trainer holds the run.
        psycopg.OperationalError: Postgres was away for longer than the limit.
    """
    with ExitStack() as stack:
        ledger = Ledger.open(
            services.database_url, pool=2, application=f"trainer {run}", patience_s=patience_s
        )
        stack.callback(ledger.close)
        epoch = _take_over(ledger, run, holder, force=force, lease_s=lease_s, stop=stop)
        failpoints.reach("resume_done")
        renewals = Ledger.open(services.database_url, pool=1, application=f"lease {run}")
        stack.callback(renewals.close)
        lease = stack.enter_context(Lease(renewals, run, epoch, lease_s=lease_s))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-trainer-")))
        waits = Waits(stop, lease, patience_s=patience_s)
        workshop = Workshop(ledger, ObjectStore(services), scratch, waits, run, epoch)
        try:
            return _train(workshop)
        except Fenced:
            raise
        except RollbookError as error:
            log.exception("run %s fails", run)
            failure = f"{type(error).__name__}: {error}"
            return _close(workshop, "failed", failure)


def _train(workshop: Workshop) -> str:
    """Everything between the lease and the close."""
    found = workshop.ledger.call(runs.read, workshop.run)
    if found.state == "finished":
        return found.state
    if found.shares != 1:
        raise ConfigError(
            f"run {found.id} has {found.shares} shares; this trainer is one process and trains "
            "one share: create the run with shares = 1"
        )
    stream = datasets.open_stream(found.config)
    try:
        if found.state == "creating":
            workshop.create(found, stream.position(0))
            found = workshop.ledger.call(runs.read, workshop.run)
        learner, state = workshop.restore(found)
        consumer = Consumer(workshop.ledger, workshop.run, workshop.epoch, stream, workshop.waits)
        session = Session(workshop, learner, consumer, step=state.step, version=state.version)
        failpoints.reach("restored")
        consumer.verify_data(state.position)
        session.replay()
    except Stopped:
        return _close(workshop, "closed")
    try:
        return session.train()
    except Stopped:
        session.checkpoint()
        return _close(workshop, "closed")


@dataclass
class Session:
    """A restored run at work. `step` and `version` describe the weights in memory."""

    workshop: Workshop
    learner: Learner
    consumer: Consumer
    step: int
    version: int

    def __post_init__(self) -> None:
        w, config = self.workshop, self.learner.config
        self.found = self._read()
        self.saved = self.step
        self.guard = DriftGuard(config.model.dtype)
        self.publisher = Publisher(
            w.ledger,
            w.store,
            w.scratch,
            self.learner.policy,
            w.waits,
            w.run,
            w.epoch,
            model=str(self.found.world["model_manifest"]),
            longest=config.max_context_tokens,
            sync_every=config.schedule.sync_every,
        )

    def replay(self) -> None:
        """Recompute the steps since the checkpoint and compare what they make.

        Raises:
            ReplayDiverged: a step does not reproduce its digest; training on would be another run.
        """
        last = self.found.next_step
        for step in range(self.step, last):
            self.workshop.waits.check()
            plan = self.workshop.ledger.call(
                steps.read_plan, self.workshop.run, step, self.consumer.share
            )
            assert plan is not None, f"applied step {step} has no plan"
            outcome = self._compute(plan)
            self.workshop.ledger.call(
                steps.verify_replay,
                self.workshop.run,
                self.workshop.epoch,
                step,
                updated=outcome.updated,
                weights_sha256=self._digest(),
            )
            log.info("replayed step %d of %d", step, last - 1)
            self._advance(outcome)
            failpoints.reach("replay_mid")
            self._checkpoint_if_due()

    def train(self) -> str:
        """Steps until nothing is left to train."""
        first = self.found.first_version
        while True:
            self.workshop.waits.check()
            self.publisher.publish_if_due(self.version, first=self.version == first)
            plan = self.consumer.next_plan(self.step, idle=self.checkpoint)
            if isinstance(plan, End):
                log.info("run %s ends: %s", self.workshop.run, plan.reason)
                self.checkpoint()
                return _close(self.workshop, "finished")
            outcome = self._compute(plan)
            self._apply(plan, outcome)
            self._advance(outcome)
            self._checkpoint_if_due()
            self._watch(outcome)

    def checkpoint(self) -> None:
        """Make the present step durable."""
        if self.saved >= self.step:
            return
        w = self.workshop
        position = self.consumer.position()
        saved = w.waits.outlast(
            lambda: checkpoint.save(
                w.store,
                w.scratch,
                self.learner.policy,
                self.learner.optimizer,
                run=w.run,
                step=self.step,
                version=self.version,
                epoch=w.epoch,
                position=position,
            )
        )
        failpoints.reach("ck_uploaded")

        def record(tx: Tx) -> None:
            checkpoints.record(
                tx,
                w.run,
                w.epoch,
                step=self.step,
                version=self.version,
                prefix=saved.prefix,
                manifest_sha256=saved.manifest_sha256,
                bytes=saved.bytes,
                data_position=position,
                rng=saved.rng,
                world=self.found.world,
            )
            failpoints.reach("ck_mid")

        w.ledger.call(record)
        self.saved = self.step
        failpoints.reach("ck_done")

    def _checkpoint_if_due(self) -> None:
        if self.step - self.saved >= self.learner.config.checkpoint.every:
            self.checkpoint()

    def _watch(self, outcome: Outcome) -> None:
        """Pause the run when the engines drift away from the trainer."""
        alarm = self.guard.alarm(outcome.metrics)
        if alarm is None:
            return
        w = self.workshop
        log.error("run %s is paused: %s; `rollbook resume %s` goes on", w.run, alarm, w.run)

        def pause(tx: Tx) -> None:
            if runs.lock(tx, w.run).state == "running":
                runs.pause(tx, w.run)

        w.ledger.call(pause)

    def _compute(self, plan: Planned) -> Outcome:
        """The step's effect on the weights: a function of its plan and the weights before it."""
        determinism.seed_step(self.learner.config.seed, plan.step, self.consumer.share)
        call, run = self.workshop.ledger.call, self.workshop.run
        return self.learner.step(
            self.consumer.read(plan),
            self.version,
            latencies=call(records.latencies, run, plan.step),
            cancelled_tokens=call(records.cancelled_tokens, run, plan.step),
        )

    def _apply(self, plan: Planned, outcome: Outcome) -> None:
        w = self.workshop
        waited = w.waits.take()
        digest = self._digest()

        def book(tx: Tx) -> None:
            served = versions.served(tx, w.run)
            behind = self.version + outcome.updated - (0 if served is None else served)
            before = records.last(tx, w.run, plan.step).get("totals", {})
            totals = records.totals(tx, w.run)
            metrics = outcome.metrics | {f"waited/{kind}": s for kind, s in waited.items()}
            metrics |= records.environment_metrics(tx, w.run, plan.step)
            metrics["publish_lag"] = float(behind)
            steps.apply(
                tx,
                w.run,
                w.epoch,
                plan.step,
                updated=outcome.updated,
                weights_sha256=digest,
                cause=outcome.cause,
                metrics=metrics,
                record={
                    "updates": self.version + outcome.updated,
                    "optimizer_updates": outcome.optimizer_updates,
                    "version": records.oldest(tx, w.run, plan.step),
                    "lag": max((row.lag for row in plan.rows), default=0),
                    "groups": len(plan.rows),
                    "waited": sum(waited.values()),
                    "waited_for": waited,
                    "totals": totals,
                }
                | records.since(before, totals),
            )
            failpoints.reach("apply_mid")

        w.ledger.call(book)
        _tell(plan, outcome, waited)
        failpoints.reach("apply_done")

    def _advance(self, outcome: Outcome) -> None:
        self.step += 1
        self.version += outcome.updated

    def _digest(self) -> bytes:
        return weights_digest(self.learner.policy.weights())

    def _read(self) -> Run:
        return self.workshop.ledger.call(runs.read, self.workshop.run)


def _take_over(
    ledger: Ledger,
    run: str,
    holder: str,
    *,
    force: bool,
    lease_s: float,
    stop: Callable[[], bool],
) -> int:
    """The run's next epoch; waits for a lease that nobody renews any more."""
    give_up = time.monotonic() + 1.5 * max(lease_s, LEASE_S)
    while True:
        present = ledger.call(runs.holder, run)
        dead = present is not None and _is_dead(present)
        try:
            return ledger.call(runs.take_over, run, holder, lease_s=lease_s, force=force or dead)
        except RunHeld as held:
            if stop() or time.monotonic() > give_up:
                raise
            log.info("waiting for the lease: %s", held)
        time.sleep(1.0)


def _is_dead(holder: str) -> bool:
    """Whether the holder was a process of this host that is gone."""
    host, _, pid = holder.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _close(
    workshop: Workshop,
    state: Literal["closed", "failed", "finished"],
    failure: str | None = None,
) -> str:
    def close(tx: Tx) -> str:
        runs.close(tx, workshop.run, workshop.epoch, state, failure)
        failpoints.reach("close_mid")
        return runs.read(tx, workshop.run).state

    final = workshop.ledger.call(close)
    failpoints.reach("close_done")
    return final


def _tell(plan: Planned, outcome: Outcome, waited: dict[str, float]) -> None:
    figures = [
        f"{name} {outcome.metrics[name]:.4g}"
        for name in ("reward/mean", "loss", "grad_norm")
        if name in outcome.metrics
    ]
    effect = "updated" if outcome.updated else f"no update ({outcome.cause})"
    log.info(
        "step %d: %s",
        plan.step,
        ", ".join(
            [f"{len(plan.rows)} groups", *figures, effect, f"waited {sum(waited.values()):.2f} s"]
        ),
        extra={"action": "step", "step": plan.step, "cause": outcome.cause},
    )
