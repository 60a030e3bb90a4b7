"""A run that a loop of one's own trains: what the ledger is asked and told on its behalf.

The same hand-over, plan, publication and record as the built-in trainer's, from the same parts of
`trainer/`; the weights, the optimizer and the checkpoints are the loop's.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from domain import failpoints, holders, tracing
from domain.config import RunConfig
from domain.errors import ConfigError, DataChanged, LedgerError, RunExists, RunNotFound
from domain.services import Services
from rollbook import publishing
from rollbook.publishers import Desk, EnginePublisher, Publisher
from storage import cancelling, checkpoints, images, plans, runs, scratch, steps
from storage.database import Ledger, Tx, canonical
from storage.objects import ObjectStore, digest
from storage.plans import Planned
from storage.runs import Run
from trainer import batch, booking
from trainer.batch import Batch
from trainer.booking import Booked, Done
from trainer.consumer import Consumer, End
from trainer.drift import DriftGuard
from trainer.feed import Feed
from trainer.lease import LEASE_S, Lease, acquire
from trainer.waiting import Waits

QUIET_S = 10.0
"""Seconds that a close waits for cancelled rollouts; what is left ends with its worker."""


def recorded(services: Services, run: str) -> RunConfig | None:
    """A run's configuration, if the ledger has it."""
    ledger = Ledger.open(services.database_url, pool=1, application="rollbook loop")
    try:
        return ledger.call(runs.read, run).config
    except RunNotFound:
        return None
    finally:
        ledger.close()


def create(services: Services, config: RunConfig) -> RunConfig:
    """Register a run; if somebody was faster, his configuration is what counts."""
    ledger = Ledger.open(services.database_url, pool=1, application="rollbook loop")
    try:
        ledger.call(runs.create, config, world={})
    except RunExists:
        return ledger.call(runs.read, config.name).config
    finally:
        ledger.close()
    return config


class OwnRun:
    """One run, held by this process until it is closed."""

    def __init__(
        self,
        services: Services,
        config: RunConfig,
        publisher: Publisher,
        feed: Feed,
        *,
        model: Path,
        watch: Callable[[], None],
        force: bool = False,
        lease_s: float = LEASE_S,
        patience_s: float | None = None,
    ) -> None:
        """Take the run; it must be in the ledger.

        Args:
            services: Postgres and the object store.
            config: as recorded.
            publisher: puts weights into engines.
            feed: the loop's batches.
            model: folder of its description.
            watch: called at every poll; raises if what samples for the run has broken.
            force: take the run from a holder that is alive.
            lease_s: how long others must wait after this process died.
            patience_s: seconds for which an outage only stalls; default: `schedule.max_outage`.

        Raises:
            RunHeld: another process holds it.
        """
        self.config = config
        self.name = config.name
        self._publisher = publisher
        self._guard = DriftGuard(config.model.dtype)
        self._stack = ExitStack()
        limit = patience_s or config.schedule.max_outage
        with ExitStack() as opening:
            self.ledger = Ledger.open(
                services.database_url, pool=2, application=f"loop {self.name}", patience_s=limit
            )
            opening.callback(self.ledger.close)
            holder = holders.here()
            self.epoch = acquire(
                self.ledger, self.name, holder, force=force, lease_s=lease_s, stop=lambda: False
            )
            renewals = Ledger.open(services.database_url, pool=1, application=f"lease {self.name}")
            opening.callback(renewals.close)
            lease = opening.enter_context(Lease(renewals, self.name, self.epoch, lease_s=lease_s))
            self._waits = Waits(_never(watch), lease, patience_s=limit)
            self._desk = Desk(
                ledger=self.ledger,
                store=ObjectStore(services),
                scratch=opening.enter_context(scratch.folder("loop")),
                waits=self._waits,
                config=config,
                epoch=self.epoch,
                engines=services.engines,
                model=model,
            )
            self._consumer = Consumer(self.ledger, self.name, self.epoch, feed, self._waits)
            self._stack = opening.pop_all()

    def read(self) -> Run:
        """The run as it is now."""
        return self.ledger.call(runs.read, self.name)

    def begin(self, weights: object) -> None:
        """Make the given weights version 0, unless the run has begun.

        Raises:
            ConfigError: they are not the model's, or the model is another than the run's.
        """
        found = self.read()
        model = publishing.upload_model(self._desk)
        if isinstance(self._publisher, EnginePublisher):
            self._publisher.bind(self._desk, model)
        if found.state != "creating":
            if found.world["model_manifest"] != model:
                raise ConfigError(
                    f"run {self.name!r} was created with the model {found.world['model_manifest']}, "
                    f"now it is {model}: architecture, tokenizer or chat template differ. Restore "
                    "it, or choose another run name"
                )
            return
        first = publishing.first_version(self._desk, self._publisher, weights)
        failpoints.reach("c_uploaded")

        def begin(tx: Tx) -> None:
            runs.set_world(tx, self.name, self.epoch, {"model_manifest": model})
            checkpoints.create_first(
                tx,
                self.name,
                self.epoch,
                weights_sha256=first.sha256,
                manifest_key=first.manifest_key,
                weights_bytes=first.size,
                probe=first.probe,
                world={"model_manifest": model},
                data_position={"batch": 0},
                **_state_row(self.name, 0, {}),
            )

        self.ledger.call(begin)
        failpoints.reach("c_row")

    def plan(self, step: int, updates: int, weights: Callable[[], object]) -> tuple[Planned, bool]:
        """The groups of a step, and whether it was applied before.

        Args:
            step: which.
            updates: the loop's own count of versions.
            weights: what `updates` made.

        Raises:
            LedgerError: the loop's state does not belong to this step.
            DataChanged: a batch has other tasks than the ledger recorded.
            EngineError: the engines do not take the weights.
        """
        found = self.read()
        self._consumer.verify_data({"batch": step})
        if step < found.next_step:
            plan = self.ledger.call(plans.read, self.name, step, 0)
            assert plan is not None, f"applied step {step} has no plan"
            self._check_updates(step, updates, plan.version_before)
            return plan, True
        self._check_updates(step, updates, found.version)
        kept = found.durable_step is not None and found.durable_step >= step
        if self.config.trainer.exact == "order" and not kept:
            raise LedgerError(
                f'exact = "order" samples from weights that are kept only: take state_dict() (and '
                f"save it) after every step; step {step} of run {self.name} was not"
            )
        with tracing.span("step", run=self.name, step=step):
            publishing.publish_if_due(self._desk, self._publisher, updates, weights)
            answer = self._consumer.next_plan(step)
        if isinstance(answer, End):
            raise DataChanged(
                f"run {self.name} recorded that its data ends before batch {step}; restore the "
                "data set, or start a new run"
            )
        return answer, False

    def rollouts(self, plan: Planned) -> Batch:
        """What a plan trains."""
        return batch.read(self.ledger, self._consumer, plan)

    def image(self, sha256: str) -> bytes:
        """The file of an image that rollouts were shown."""
        key = self.ledger.call(images.require, sha256)
        return self._desk.store.get(key, sha256=sha256)

    def apply(self, plan: Planned, done: Done) -> Booked:
        """Book a step that was computed for the first time; the run is paused when it shows that
        the engines sample from other weights."""
        shares = [booking.of_share(plan, self._waits.take())]
        booked = booking.book(self.ledger, self.name, self.epoch, plan, done, shares)
        self._guard.watch(self.ledger, self.name, done.metrics)
        failpoints.reach("apply_done")
        return booked

    def verify(self, plan: Planned, done: Done) -> None:
        """Compare a step that was computed again with what it made before.

        Raises:
            ReplayDiverged: it made other weights.
        """
        self._waits.take()
        self.ledger.call(
            steps.verify_replay,
            self.name,
            self.epoch,
            plan.step,
            updated=done.updated,
            weights_sha256=done.weights_sha256,
        )

    def note_state(self, step: int, version: int, state: Mapping[str, Any]) -> None:
        """Count the steps before `step` as trained: the loop has taken its state there."""
        found = self.read()
        if found.durable_step is None or step <= found.durable_step:
            return

        def record(tx: Tx) -> None:
            checkpoints.record(
                tx,
                self.name,
                self.epoch,
                step=step,
                version=version,
                data_position={"batch": step},
                world=found.world,
                **_state_row(self.name, step, state),
            )

        self.ledger.call(record)

    def stop(
        self, state: Literal["closed", "failed", "finished"], failure: str | None = None
    ) -> None:
        """Cancel what is in flight; its groups stay owed, their finished members are kept."""
        self.ledger.call(runs.close, self.name, self.epoch, state, failure)

    def close(self, *, finished: bool) -> None:
        """`stop`, and give what is in flight a moment to notice: engines are idle then."""
        self.stop("finished" if finished else "closed")
        give_up = time.monotonic() + QUIET_S
        while self.ledger.call(cancelling.in_flight, self.name) and time.monotonic() < give_up:
            time.sleep(0.1)

    def release(self) -> None:
        """Give the lease and all connections back."""
        self._stack.close()

    def _check_updates(self, step: int, updates: int, version: int) -> None:
        if updates != version:
            raise LedgerError(
                f"state.updates is {updates}, but step {step} of run {self.name} starts from "
                f"version {version}; load the trainer state that was saved together with the "
                "scheduler's state_dict(), or start a new run"
            )


def _state_row(run: str, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint row says of a state that the loop keeps itself."""
    content = canonical({"run": run, "step": step, "state": state})
    return {
        "prefix": f"own-loop/{run}/{step:08d}",
        "manifest_sha256": bytes.fromhex(digest(content)),
        "bytes": len(content),
        "rng": {},
    }


def _never(watch: Callable[[], None]) -> Callable[[], bool]:
    """A loop of one's own is stopped by itself; only what has broken ends its waits."""

    def stop() -> bool:
        watch()
        return False

    return stop
