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

Of several ranks, rank 0 takes the run over and closes it; all of them run this with its epoch.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Literal

from domain import failpoints
from domain.data import TaskStream
from domain.errors import ConfigError, Fenced, RollbookError, RunStopped
from domain.mixing import MixedStream
from domain.risks import acknowledged
from domain.services import Services
from domain.shares import Division, Share, other_bits
from storage import datasets, runs, scratch
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from storage.runs import Run
from trainer.consumer import Consumer
from trainer.creation import Workshop
from trainer.lease import LEASE_S, Lease, acquire
from trainer.ranks import Ranks
from trainer.session import Session, Trained
from trainer.waiting import Stopped, Waits

log = logging.getLogger(__name__)


def run(
    run: str,
    services: Services,
    *,
    holder: str,
    force: bool = False,
    stop: Callable[[], bool] = lambda: False,
    lease_s: float = LEASE_S,
    patience_s: float | None = None,
    stream: TaskStream | MixedStream | None = None,
    watcher: Callable[[Trained], None] = lambda _: None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Train a run of the ledger until it ends, is told to stop, or fails.

    Args:
        run: its name.
        services: Postgres and the object store.
        holder: who this is, as `host:pid`, for people and to recognise a dead holder.
        force: take the run from a holder that is alive.
        stop: asked at every poll; True ends the process with a checkpoint.
        lease_s: how long others must wait after this process died.
        patience_s: seconds for which an outage only stalls; default: `schedule.max_outage`.
        stream: the run's data, where it is an object of this process and not `tasks.dataset`.
        watcher: called after each step that this process applied; the next one waits for it.
        environ: holds torchrun's variables where several processes train the run together.

    Returns:
        the run's state: `finished`, `closed`, or `failed` with the cause in the ledger.

    Raises:
        ConfigError: the run has another number of ranks; it is left as it is.
        Fenced: another trainer has taken over.
        RunHeld: a live trainer holds the run.
        psycopg.OperationalError: Postgres was away for longer than the limit.
    """
    with ExitStack() as stack:
        ledger = Ledger.open(services.database_url, pool=2, application=f"trainer {run}")
        stack.callback(ledger.close)
        found = ledger.call(runs.read, run)
        config = found.config
        if stream is None:
            datasets.refuse_own_loop(config)
        ledger.patience_s = patience_s = patience_s or config.schedule.max_outage
        # A peer is waited for while it outlasts an outage, and not much longer.
        limit_s, readers = 2 * (patience_s + lease_s), config.trainer.readers
        ranks = stack.enter_context(Ranks.joined(environ, timeout_s=limit_s, readers=readers))
        wanted = found.shares * readers
        if found.state != "finished" and wanted != ranks.size:
            raise ConfigError(
                f"run {run} has {found.shares} shares of its data with {readers} readers each "
                f"(trainer.ranks = {wanted}), and {ranks.size} trainer processes were started; start "
                f"{wanted}, as `rollbook resume {run}` or torchrun --nproc-per-node {wanted} does, or go on "
                f"with another number from a durable step: `rollbook resume {run} --ranks "
                f"{ranks.size}`"
            )
        take = partial(acquire, ledger, run, holder, force=force, lease_s=lease_s, stop=stop)
        epoch = ranks.decide("lease", take)
        failpoints.reach("resume_done")
        renewals = Ledger.open(services.database_url, pool=1, application=f"lease {run}")
        stack.callback(renewals.close)
        lease = stack.enter_context(Lease(renewals, run, epoch, lease_s=lease_s))
        place = stack.enter_context(scratch.folder("trainer"))
        waits = Waits(stop, lease, patience_s=patience_s)
        workshop = Workshop(ledger, ObjectStore(services), place, waits, run, epoch, ranks)
        try:
            return _train(workshop, stream, watcher)
        except Exception as error:
            ranks.tell(error)
            if isinstance(error, Fenced) or not isinstance(error, RollbookError):
                raise
            return _ended(workshop, error)


def _train(
    workshop: Workshop, stream: TaskStream | MixedStream | None, watcher: Callable[[Trained], None]
) -> str:
    """Everything between the lease and the close."""
    found = workshop.ledger.call(runs.read, workshop.run)
    if found.state == "finished":
        return _close(workshop, "finished")
    ranks = workshop.ranks
    for risk in acknowledged(found.config):
        log.warning("run %s: %s", found.id, risk)
    if (before := found.world.get("shares_before")) is not None:
        log.warning("run %s: %s", found.id, other_bits(before, found.shares, found.first_step))
    opened = partial(_share, stream, found, ranks.share)
    try:
        share = ranks.together("data", opened)
        if found.state == "creating":
            ranks.first("create", partial(workshop.create, found, share.position(0)))
            found = workshop.ledger.call(runs.read, workshop.run)
        learner, state = workshop.restore(found)
        consumer = Consumer(
            workshop.ledger, workshop.run, workshop.epoch, share, workshop.waits, ranks
        )
        session = Session(
            workshop, learner, consumer, step=state.step, version=state.version, watcher=watcher
        )
        failpoints.reach("restored")
        ranks.together("verify data", partial(consumer.verify_data, state.position))
        session.replay()
    except Stopped:
        return _close(workshop, "closed")
    try:
        session.train()
    except Stopped:
        session.checkpoint()
        return _close(workshop, "closed")
    return _close(workshop, "finished")


def _ended(workshop: Workshop, error: RollbookError) -> str:
    """Close the run, for what ended it."""
    if isinstance(error, RunStopped):
        log.info("%s", error)
        return _close(workshop, "closed")  # one that has failed stays failed
    log.error("run %s fails", workshop.run, exc_info=error)
    return _close(workshop, "failed", f"{type(error).__name__}: {error}")


def _close(
    workshop: Workshop,
    state: Literal["closed", "failed", "finished"],
    failure: str | None = None,
) -> str:
    def commit(tx: Tx) -> str:
        runs.close(tx, workshop.run, workshop.epoch, state, failure)
        failpoints.reach("close_mid")
        return runs.read(tx, workshop.run).state

    def close() -> str:
        return workshop.ledger.call(commit)

    ranks = workshop.ranks
    final = close() if ranks.apart else ranks.decide("close", close)
    failpoints.reach("close_done")
    return final


def _share(
    stream: TaskStream | MixedStream | None, run: Run, rank: int
) -> TaskStream | MixedStream | Share:
    """The rank's share of the run's data."""
    whole = stream or datasets.open_stream(run.config)
    division = Division.of(run.world, run.shares)
    return whole if division == Division(1) else Share(whole, rank, division)
