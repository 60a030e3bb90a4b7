"""A restored run at work: replay, then publish, plan, compute, apply and checkpoint, step by step.

Every rank holds the same weights, or its slices of the same, and goes through the same steps; what
is written once (the booked step, the checkpoint's manifest, the published version) is written by rank
0 while the others wait. Publishing is a poll of all ranks, since it may wait for engines as long as it
takes.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from domain import failpoints, tracing
from domain.errors import LedgerError
from domain.rollouts import Rollout
from storage import checkpoints, plans, runs, steps
from storage.database import Tx
from storage.plans import Planned
from storage.runs import Run
from trainer import batch, booking, checkpoint, determinism
from trainer.batch import Batch
from trainer.booking import Booked
from trainer.checkpoint import Part
from trainer.consumer import Consumer, End
from trainer.creation import Workshop
from trainer.drift import DriftGuard
from trainer.model import weights_digest
from trainer.publishing import Publisher
from trainer.ranks import Ranks
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
        self.ranks = w.ranks
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
            ranks=w.ranks,
        )

    def replay(self) -> None:
        """Recompute the steps since the checkpoint and compare what they make.

        Raises:
            ReplayDiverged: a step does not reproduce its digest; training on would be another run.
        """
        last = self.found.next_step
        for step in range(self.step, last):
            plan, planned = self.ranks.together("replay", partial(self._read_again, step))
            outcome = self._compute(plan, planned)
            self.ranks.first("verify", partial(self._verify, step, outcome, self._digest(step)))
            log.info("replayed step %d of %d", step, last - 1)
            self._advance(outcome)
            failpoints.reach("replay_mid")
            self._checkpoint_if_due()

    def train(self) -> None:
        """Steps until nothing is left to train; the last one is durable then."""
        first = self.found.first_version
        while True:
            self.ranks.together("check", self.workshop.waits.check)
            with tracing.span("step", run=self.workshop.run, step=self.step):
                done = self._step(first)
            if isinstance(done, End):
                log.info("run %s ends: %s", self.workshop.run, done.reason)
                return
            if done is not None:
                self.watcher(done)

    def _step(self, first: int) -> Trained | End | None:
        """Train one step; None from all ranks but the one that books it."""
        self.publisher.publish_if_due(self.version, first=self.version == first)
        plan = self.consumer.next_plan(self.step, idle=self.checkpoint)
        if isinstance(plan, End):
            self.checkpoint()
            return plan
        with tracing.span("compute", groups=len(plan.rows)):
            read = partial(batch.read, self.workshop.ledger, self.consumer, plan)
            planned = self.ranks.together("read", read)
            outcome = self._compute(plan, planned)
        with tracing.span("apply"):
            booked = self._apply(plan, outcome)
        self._advance(outcome)
        tracing.note(version=self.version, updated=outcome.updated)
        self._checkpoint_if_due()
        watch = self.guard.watch
        ledger, run = self.workshop.ledger, self.workshop.run
        self.ranks.first("watch", partial(watch, ledger, run, outcome.metrics))
        if booked is None:
            return None
        return Trained(
            step=plan.step,
            version=self.version,
            metrics=booked.metrics,
            rollouts=planned.rollouts,
        )

    def checkpoint(self) -> None:
        """Make the present step durable."""
        if self.saved >= self.step:
            return
        w, policy = self.workshop, self.learner.policy
        prefix = self.ranks.decide(
            "prefix", partial(checkpoint.fresh_prefix, w.run, self.step, w.epoch)
        )
        # Equal weights are stored once, by rank 0, divided ones by all.
        holds = policy.sharded or self.ranks.rank == 0
        with self.ranks.sums():
            digest = weights_digest(policy.weights()) if holds else b""
        put = partial(
            checkpoint.put_part,
            *(w.store, w.scratch, policy, self.learner.optimizer),
            prefix=prefix,
        )
        parts = self.ranks.gather("part", lambda: w.waits.outlast(put) if holds else {})
        self.ranks.first("checkpoint", partial(self._save, prefix, digest, parts))
        self.saved = self.step

    def _save(self, prefix: str, digest: bytes, parts: Sequence[Part]) -> None:
        """Complete the checkpoint whose parts are stored, and record it."""
        w = self.workshop
        position = self.consumer.position()
        saved = w.waits.outlast(
            lambda: checkpoint.seal(
                w.store,
                self.learner.policy,
                [part for part in parts if part],
                prefix=prefix,
                weights_sha256=digest,
                run=w.run,
                step=self.step,
                version=self.version,
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
        failpoints.reach("ck_done")

    def _checkpoint_if_due(self) -> None:
        if self.step - self.saved >= self.learner.config.checkpoint.every:
            with tracing.span("checkpoint", step=self.step):
                self.checkpoint()

    def _compute(self, plan: Planned, planned: Batch) -> Outcome:
        """The step's effect on the weights: a function of its plan and the weights before it."""
        determinism.seed_step(self.learner.config.seed, plan.step, self.consumer.share)
        with self.ranks.sums():
            return self.learner.step(planned, self.version)

    def _read_again(self, step: int) -> tuple[Planned, Batch]:
        """This rank's part of a step that was applied."""
        w = self.workshop
        w.waits.check()
        plan = w.ledger.call(plans.read, w.run, step, self.consumer.share)
        assert plan is not None, f"applied step {step} has no plan"
        return plan, batch.read(w.ledger, self.consumer, plan)

    def _verify(self, step: int, outcome: Outcome, digest: bytes) -> None:
        w = self.workshop
        w.ledger.call(
            steps.verify_replay,
            w.run,
            w.epoch,
            step,
            updated=outcome.updated,
            weights_sha256=digest,
        )

    def _apply(self, plan: Planned, outcome: Outcome) -> Booked | None:
        """Book the step on rank 0; every rank logs its own part of it."""
        waited = self.workshop.waits.take()
        digest = self._digest(plan.step)
        parts = self.ranks.exchange("waits", booking.of_share(plan, waited))
        shares = self.ranks.of_shares(parts)
        booked = self.ranks.first("apply", partial(self._book, plan, outcome, digest, shares))
        _tell(plan, outcome, waited)
        failpoints.reach("apply_done")
        return booked

    def _book(
        self,
        plan: Planned,
        outcome: Outcome,
        digest: bytes,
        shares: Sequence[Mapping[str, Any]],
    ) -> Booked:
        w = self.workshop
        done = booking.Done(
            updated=outcome.updated,
            weights_sha256=digest,
            cause=outcome.cause,
            optimizer_updates=outcome.optimizer_updates,
            metrics=outcome.metrics,
        )
        return booking.book(w.ledger, w.run, w.epoch, plan, done, shares)

    def _advance(self, outcome: Outcome) -> None:
        self.step += 1
        self.version += outcome.updated

    def _digest(self, step: int) -> bytes:
        """Of the weights after a step."""
        digest = weights_digest(self.learner.policy.weights())
        return agreed_digest(self.ranks, self.workshop.run, step, digest)

    def _read(self) -> Run:
        return self.workshop.ledger.call(runs.read, self.workshop.run)


def agreed_digest(ranks: Ranks, run: str, step: int, digest: bytes) -> bytes:
    """The digest of the weights after a step, which must be every rank's.

    Raises:
        LedgerError: it is not; nothing was booked.
    """
    digests = ranks.exchange("digest", digest.hex())
    if len(set(digests)) > 1:
        raise LedgerError(
            f"the ranks of run {run} hold different weights after step {step}: "
            f"{', '.join(d[:16] for d in digests)}; a device or its kernels are not "
            "deterministic. Resume the run on other hardware"
        )
    return digest


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
