"""Runs: creation, the trainer's fencing token and lease, pause, close and failure.

    creating → running ⇄ paused → closed | failed | finished
                  ↑_______________________|  resume (take_over)

A run never goes back: its version, next step, durable step and epoch only grow (`runs_guard`). The
lease, on the server's clock, only decides when another trainer may take over; what keeps a zombie
out is the epoch, which every trainer transaction compares under the run's row lock (`fence`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b, sha256
from types import MappingProxyType
from typing import Any, Literal

from psycopg import errors, sql
from pydantic import ValidationError

from domain.config import RunConfig
from domain.errors import (
    ConfigError,
    Fenced,
    LedgerError,
    RunExists,
    RunHeld,
    RunNotFound,
    RunStopped,
    SourceBroken,
)
from storage import cancelling, settings
from storage.database import Tx, canonical, jsonb

State = Literal["creating", "running", "paused", "closed", "failed", "finished"]
SOURCE_BROKEN = "SourceBroken: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the ledger has it."""

    id: str
    config: RunConfig
    world: Mapping[str, Any]  # what bits depend on beside the configuration: model, threads, torch
    state: State
    version: int  # c: optimizer steps applied that changed the weights
    next_step: int  # the first step that is not applied
    durable_step: int | None  # newest checkpoint
    first_step: int
    first_version: int
    epoch: int
    shares: int
    failure: str | None
    parent: str | None
    forked_at: int | None
    empty_from: int  # empty steps count from here
    created_at: datetime  # tells this run from one of the same name in another ledger

    @property
    def ended(self) -> bool:
        """Whether the step target is reached."""
        return self.config.steps is not None and self.next_step >= self.config.steps


FIELDS = sql.SQL(
    "run_id AS id, config::text AS config, state, version, next_step, durable_step, first_step, "
    "first_version, trainer_epoch AS epoch, shares, failure, parent, forked_at, empty_from, "
    "created_at"
)


def create(
    tx: Tx,
    config: RunConfig,
    *,
    world: Mapping[str, Any],
    shares: int | None = None,
    has_verifier: bool = True,
    columns: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Insert the run (state `creating`), its shares and its partition of `segments`.

    `shares` are as many as the configuration says, unless given. `columns` are further columns of the row: a fork starts at its parent's step.

    Raises:
        RunExists: the name is taken.
    """
    stored = config.model_dump(mode="json")
    shares = config.trainer.shares if shares is None else shares
    row = (
        settings.columns(config)
        | {
            "run_id": config.name,
            "config": jsonb({"run": stored, "world": dict(world)}),
            "config_sha256": sha256(canonical(stored)).digest(),
            "shares": shares,
            "has_verifier": has_verifier,
        }
        | dict(columns)
    )
    insert = sql.SQL("INSERT INTO runs({}) VALUES ({}) ON CONFLICT (run_id) DO NOTHING").format(
        sql.SQL(", ").join(map(sql.Identifier, row)),
        sql.SQL(", ").join(map(sql.Placeholder, row)),
    )
    if tx.execute(insert, row).rowcount == 0:
        raise RunExists(
            f"run {config.name!r} exists already; `rollbook resume {config.name}`, or choose "
            "another name"
        )
    tx.execute(
        "INSERT INTO shares(run_id, share) SELECT %s, s FROM generate_series(0, %s) AS s",
        (config.name, shares - 1),
    )
    # Attached, not created in place: that would lock out every run that is sampling.
    digest = blake2b(config.name.encode(), digest_size=8).hexdigest()
    partition = sql.Identifier(f"segments_{digest}")
    tx.execute(sql.SQL("CREATE TABLE {} (LIKE segments INCLUDING ALL)").format(partition))
    tx.execute(
        sql.SQL("ALTER TABLE segments ATTACH PARTITION {} FOR VALUES IN ({})").format(
            partition, sql.Literal(config.name)
        )
    )


def set_world(tx: Tx, run: str, epoch: int, world: Mapping[str, Any]) -> None:
    """Record the world while the run is still being created; it is fixed from then on.

    Raises:
        LedgerError: the run has begun.
    """
    found = fence(tx, run, epoch)
    if found.state != "creating":
        raise LedgerError(f"run {run} is {found.state}; its world was fixed when it was created")
    tx.execute(
        "UPDATE runs SET config = jsonb_set(config, '{world}', %s) WHERE run_id = %s",
        (jsonb(dict(world)), run),
    )


def read(tx: Tx, run: str) -> Run:
    """The run as it is now, without a lock.

    Raises:
        RunNotFound: names the runs that are spelled alike.
    """
    return _one(tx, run, sql.SQL("SELECT {} FROM runs WHERE run_id = %s").format(FIELDS))


def lock(tx: Tx, run: str) -> Run:
    """The run, its row locked until the transaction ends; for writers that hold no epoch."""
    query = sql.SQL("SELECT {} FROM runs WHERE run_id = %s FOR NO KEY UPDATE").format(FIELDS)
    return _one(tx, run, query)


def fence(tx: Tx, run: str, epoch: int) -> Run:
    """`lock` for the trainer of this epoch: the first statement of each of its transactions.

    Raises:
        Fenced: another trainer has taken over.
    """
    found = lock(tx, run)
    if found.epoch != epoch:
        raise Fenced(
            f"run {run} belongs to trainer epoch {found.epoch}, this process has epoch {epoch}; "
            "another trainer took over, so this one must exit"
        )
    return found


def ensure_open(run: Run) -> None:
    """Refuse new work for a run that has stopped; a pause is not a stop.

    Raises:
        SourceBroken: the run failed because its source broke its contract.
        RunStopped: it failed otherwise, was closed or has finished.
    """
    if run.state in ("running", "paused"):
        return
    if run.failure and run.failure.startswith(SOURCE_BROKEN):
        raise SourceBroken(run.failure.removeprefix(SOURCE_BROKEN))
    why = f": {run.failure}" if run.failure else ""
    raise RunStopped(
        f"run {run.id} is {run.state}{why}; `rollbook resume {run.id}` starts it again"
    )


def take_over(tx: Tx, run: str, holder: str, *, lease_s: float, force: bool = False) -> int:
    """Make `holder` the run's trainer and return its epoch.

    A closed or failed run goes on (`running`, or `creating` if it had not begun); a finished one
    stays finished and a paused one paused. Plans of shares that failed are forgotten. With
    `on_reopen = "cancel"` groups that still run are cancelled and will be submitted again.

    `holder` says who, for people (host and pid). The lease lasts `lease_s` seconds unless renewed;
    `force` does not wait for the present holder's.

    Raises:
        RunHeld: another trainer's lease has not run out.
    """
    found = lock(tx, run)
    lease = tx.execute(
        "SELECT trainer_holder, extract(epoch FROM trainer_lease_until - now())::float AS left "
        "FROM runs WHERE run_id = %s",
        (run,),
    ).fetchone()
    assert lease is not None
    held = lease["left"] is not None and lease["left"] > 0 and lease["trainer_holder"] != holder
    if held and not force:
        raise RunHeld(
            f"run {run} is held by {lease['trainer_holder']} for another {lease['left']:.0f} s; "
            "wait for it to end, or take over with --force"
        )
    tx.execute("DELETE FROM step_shares WHERE run_id = %s AND state = 'failed'", (run,))
    if found.config.schedule.on_reopen == "cancel":
        cancelling.return_groups(tx, run, "reopen")
    row = tx.execute(
        """
        UPDATE runs SET trainer_epoch = trainer_epoch + 1, trainer_holder = %(holder)s,
            trainer_lease_until = now() + %(lease)s, failure = NULL,
            empty_from = CASE WHEN state = 'failed' THEN next_step ELSE empty_from END,
            resumed_at = CASE WHEN state = 'failed' THEN now() ELSE resumed_at END,
            state = CASE WHEN state NOT IN ('closed', 'failed') THEN state
                         WHEN durable_step IS NULL THEN 'creating' ELSE 'running' END
        WHERE run_id = %(run)s RETURNING trainer_epoch
        """,
        {"run": run, "holder": holder, "lease": timedelta(seconds=lease_s)},
    ).fetchone()
    assert row is not None
    return int(row["trainer_epoch"])


def holder(tx: Tx, run: str) -> str | None:
    """Who took the run over last and has not given it back; its lease may have run out."""
    row = tx.execute("SELECT trainer_holder FROM runs WHERE run_id = %s", (run,)).fetchone()
    return None if row is None else row["trainer_holder"]


def renew(tx: Tx, run: str, epoch: int, *, lease_s: float) -> None:
    """Extend the lease.

    Raises:
        Fenced: another trainer has taken over.
    """
    renewed = tx.execute(
        "UPDATE runs SET trainer_lease_until = now() + %s WHERE run_id = %s AND trainer_epoch = %s",
        (timedelta(seconds=lease_s), run, epoch),
    )
    if renewed.rowcount == 0:
        fence(tx, run, epoch)  # says which epoch it is, or that there is no such run


def close(
    tx: Tx,
    run: str,
    epoch: int,
    state: Literal["closed", "failed", "finished"],
    failure: str | None = None,
) -> int:
    """Stop the run and give the lease back; returns how many groups were still being sampled.

    Nothing is lost: those groups become `registered` again with their finished members, and queue
    rows stay. A run that has failed stays failed.
    """
    found = fence(tx, run, epoch)
    returned = cancelling.return_groups(tx, run, "close")
    # What is not evaluated by now is evaluated from stored weights; no engine holds a slot for it.
    tx.execute("DELETE FROM evaluation_pins WHERE run_id = %s", (run,))
    if found.state != "failed":
        # Nothing has begun without a checkpoint: the next trainer creates the run again.
        begun = found.durable_step is not None or state == "failed"
        tx.execute(
            "UPDATE runs SET state = %s, failure = %s WHERE run_id = %s",
            (state if begun else "creating", failure if state == "failed" else None, run),
        )
    tx.execute(
        "UPDATE runs SET trainer_holder = NULL, trainer_lease_until = NULL WHERE run_id = %s",
        (run,),
    )
    return returned


def fail(tx: Tx, run: str, failure: str) -> None:
    """Stop the run from outside the trainer, whose next poll raises; the first failure stands.

    Locks the run first: call it before any group is locked in the same transaction.
    """
    if lock(tx, run).state in ("failed", "closed", "finished"):
        return
    cancelling.return_groups(tx, run, "close")
    tx.execute("UPDATE runs SET state = 'failed', failure = %s WHERE run_id = %s", (failure, run))


def fail_source(tx: Tx, run: str, error: str) -> None:
    """`fail` because the source broke its contract: the trainer raises SourceBroken(error)."""
    fail(tx, run, SOURCE_BROKEN + error)


def pause(tx: Tx, run: str) -> None:
    """Stop handing over and planning; what is being sampled goes on.

    Raises:
        LedgerError: the run is not running.
    """
    _switch(tx, run, "running", "paused")


def unpause(tx: Tx, run: str) -> None:
    """Undo `pause`.

    Raises:
        LedgerError: the run is not paused.
    """
    _switch(tx, run, "paused", "running")


def _switch(tx: Tx, run: str, before: State, after: State) -> None:
    found = lock(tx, run)
    if found.state == after:
        return
    if found.state != before:
        raise LedgerError(f"run {run} is {found.state}; only a {before} run becomes {after}")
    tx.execute("UPDATE runs SET state = %s WHERE run_id = %s", (after, run))


def _one(tx: Tx, run: str, query: sql.Composed) -> Run:
    try:
        row = tx.execute(query, (run,)).fetchone()
    except errors.UndefinedTable as error:
        raise LedgerError("the database holds no ledger; run `rollbook db upgrade`") from error
    if row is None:
        names = [r["run_id"] for r in tx.execute("SELECT run_id FROM runs ORDER BY created_at")]
        near = get_close_matches(run, names, n=3) or names[-3:]
        hint = f"; there is {', '.join(near)}" if near else "; there are no runs yet"
        raise RunNotFound(f"no run {run!r} in the ledger{hint}")
    try:
        config, world = _parse(row.pop("config"))
    except ValidationError as error:
        raise ConfigError(
            f"the configuration of run {run} was written by another version, and this one cannot read "
            f"it: {error}; use the rollbook that created the run"
        ) from error
    return Run(config=config, world=world, **row)


@lru_cache(maxsize=32)
def _parse(text: str) -> tuple[RunConfig, Mapping[str, Any]]:
    stored = json.loads(text)
    return RunConfig.model_validate(stored["run"]), MappingProxyType(stored["world"])
