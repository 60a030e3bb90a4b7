"""A restored run at work: replay, then publish, plan, compute, apply and checkpoint, step by step."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from domain import failpoints
from domain.rollouts import Rollout
from storage import checkpoints, runs, steps
from storage.database import Tx
from storage.runs import Run
from storage.steps import Planned
from trainer import batch, booking, checkpoint, determinism
from trainer.batch import Batch
from trainer.booking import Booked
from trainer.consumer import Consumer, End
from trainer.creation import Workshop
from trainer.drift import DriftGuard
from trainer.model import weights_digest
from trainer.publishing import Publisher
from trainer.update import Learner, Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step that was applied, for whoever watches the session."""

    step: int
    version: int
    """After it."""
    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout]


@dataclass
class Session:
    """A restored run at work. `step` and `version` describe the weights in memory."""

    workshop: Workshop
    learner: Learner
    consumer: Consumer
    step: int
    version: int
    watcher: Callable[[Trained], None] = lambda _: None
    """Called after each step that this process applied; the next one begins when it returns."""

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
            base=self.found.world.get("base_manifest"),
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
            planned = batch.read(self.workshop.ledger, self.consumer, plan)
            outcome = self._compute(plan, planned)
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

    def train(self) -> None:
        """Steps until nothing is left to train; the last one is durable then."""
        first = self.found.first_version
        while True:
            self.workshop.waits.check()
            self.publisher.publish_if_due(self.version, first=self.version == first)
            plan = self.consumer.next_plan(self.step, idle=self.checkpoint)
            if isinstance(plan, End):
                log.info("run %s ends: %s", self.workshop.run, plan.reason)
                self.checkpoint()
                return
            planned = batch.read(self.workshop.ledger, self.consumer, plan)
            outcome = self._compute(plan, planned)
            booked = self._apply(plan, outcome)
            self._advance(outcome)
            self._checkpoint_if_due()
            self.guard.watch(self.workshop.ledger, self.workshop.run, outcome.metrics)
            self.watcher(
                Trained(
                    step=plan.step,
                    version=self.version,
                    metrics=booked.metrics,
                    rollouts=planned.rollouts,
                )
            )

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
                born=self.found.created_at,
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

    def _compute(self, plan: Planned, planned: Batch) -> Outcome:
        """The step's effect on the weights: a function of its plan and the weights before it."""
        determinism.seed_step(self.learner.config.seed, plan.step, self.consumer.share)
        return self.learner.step(planned, self.version)

    def _apply(self, plan: Planned, outcome: Outcome) -> Booked:
        w = self.workshop
        waited = w.waits.take()
        done = booking.Done(
            updated=outcome.updated,
            weights_sha256=self._digest(),
            cause=outcome.cause,
            optimizer_updates=outcome.optimizer_updates,
            metrics=outcome.metrics,
        )
        booked = booking.book(w.ledger, w.run, w.epoch, plan, done, waited)
        _tell(plan, outcome, waited)
        failpoints.reach("apply_done")
        return booked

    def _advance(self, outcome: Outcome) -> None:
        self.step += 1
        self.version += outcome.updated

    def _digest(self) -> bytes:
        return weights_digest(self.learner.policy.weights())

    def _read(self) -> Run:
        return self.workshop.ledger.call(runs.read, self.workshop.run)


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
