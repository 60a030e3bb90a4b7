"""Durable trainer states, keyed by step: checkpoint N is the state before step N.

An uploaded checkpoint counts only once a fenced transaction names it here; what no row names is
swept. Recording one makes the steps before it durable and their groups trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domain.errors import LedgerError
from storage import runs
from storage.database import Tx, jsonb


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint as the ledger has it."""

    step: int  # the next step to compute
    version: int
    prefix: str
    manifest_sha256: bytes
    size: int  # bytes of all its objects
    data_position: Mapping[str, Any]  # the data is read again from here, and must be the same
    rng: Mapping[str, Any]
    world: Mapping[str, Any]
    epoch: int
    state: str


_FIELDS = (
    "step, version, s3_prefix AS prefix, manifest_sha256, bytes AS size, data_position, rng, world, "
    "trainer_epoch AS epoch, state"
)


def create_first(
    tx: Tx,
    run: str,
    epoch: int,
    *,
    weights_sha256: bytes,
    manifest_key: str,
    weights_bytes: int | None,
    probe: Mapping[str, Any] | None,
    prefix: str,
    manifest_sha256: bytes,
    bytes: int,
    data_position: Mapping[str, Any],
    rng: Mapping[str, Any],
    world: Mapping[str, Any],
) -> None:
    """Begin a run: version 0 uploaded, checkpoint 0 durable, state `running`. Once only.

    Raises:
        LedgerError: the run has begun with other weights.
    """
    owner = runs.fence(tx, run, epoch)
    if owner.state != "creating":
        first = at(tx, run, owner.first_step)
        if first is None or first.manifest_sha256 != manifest_sha256:
            raise LedgerError(f"run {run} is {owner.state}: it has begun with another checkpoint 0")
        return
    tx.execute(
        """
        INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, weights_bytes,
            probe, state, trainer_epoch, uploaded_at)
        VALUES (%s, %s, %s, %s, %s, %s, 'uploaded', %s, now())
        """,
        (
            run,
            owner.first_version,
            weights_sha256,
            manifest_key,
            weights_bytes,
            None if probe is None else jsonb(probe),
            epoch,
        ),
    )
    row = CheckpointRow(
        step=owner.first_step,
        version=owner.first_version,
        prefix=prefix,
        manifest_sha256=manifest_sha256,
        size=bytes,
        data_position=data_position,
        rng=rng,
        world=world,
        epoch=epoch,
        state="durable",
    )
    _insert(tx, run, row)
    tx.execute(
        "UPDATE runs SET durable_step = first_step, state = 'running' WHERE run_id = %s", (run,)
    )


def record(
    tx: Tx,
    run: str,
    epoch: int,
    *,
    step: int,
    version: int,
    prefix: str,
    manifest_sha256: bytes,
    bytes: int,
    data_position: Mapping[str, Any],
    rng: Mapping[str, Any],
    world: Mapping[str, Any],
) -> bool:
    """Make checkpoint `step` durable; False if it, or a later one, was durable already.

    Raises:
        LedgerError: the step was not applied, or had another version before it.
    """
    owner = runs.fence(tx, run, epoch)
    if owner.durable_step is None or step > owner.next_step:
        raise LedgerError(
            f"checkpoint {step} of run {run} is ahead of its next step {owner.next_step}"
        )
    if step <= owner.durable_step:
        return False
    before = tx.execute(
        "SELECT %s + count(*) FILTER (WHERE updated) AS version FROM steps "
        "WHERE run_id = %s AND step < %s",
        (owner.first_version, run, step),
    ).fetchone()
    assert before is not None
    if before["version"] != version:
        raise LedgerError(
            f"checkpoint {step} of run {run} claims version {version}; before that step the "
            f"version was {before['version']}"
        )
    row = CheckpointRow(
        step=step,
        version=version,
        prefix=prefix,
        manifest_sha256=manifest_sha256,
        size=bytes,
        data_position=data_position,
        rng=rng,
        world=world,
        epoch=epoch,
        state="durable",
    )
    _insert(tx, run, row)
    tx.execute(
        "SELECT 1 FROM queue WHERE run_id = %s AND state = 'applied' AND step < %s "
        "ORDER BY group_id, part, gen FOR NO KEY UPDATE",
        (run, step),
    )
    tx.execute(
        "UPDATE queue SET state = 'trained' WHERE run_id = %s AND state = 'applied' AND step < %s",
        (run, step),
    )
    tx.execute(
        "UPDATE steps SET state = 'durable' WHERE run_id = %s AND state = 'applied' AND step < %s",
        (run, step),
    )
    tx.execute("UPDATE runs SET durable_step = %s WHERE run_id = %s", (step, run))
    return True


def newest(tx: Tx, run: str) -> CheckpointRow:
    """The checkpoint a resumed trainer starts from.

    Raises:
        LedgerError: the run has not begun.
    """
    found = runs.read(tx, run)
    row = None if found.durable_step is None else at(tx, run, found.durable_step)
    if row is None:
        raise LedgerError(f"run {run} is {found.state} and has no checkpoint yet")
    return row


def oldest(tx: Tx, run: str) -> CheckpointRow:
    """The earliest checkpoint that is still kept: what can be recomputed begins there.

    Raises:
        LedgerError: the run has not begun.
    """
    row = tx.execute(
        f"SELECT {_FIELDS} FROM checkpoints "  # noqa: S608
        "WHERE run_id = %s AND state = 'durable' ORDER BY step LIMIT 1",
        (run,),
    ).fetchone()
    if row is None:
        raise LedgerError(f"run {run} is {runs.read(tx, run).state} and has no checkpoint yet")
    return CheckpointRow(**row)


def at(tx: Tx, run: str, step: int) -> CheckpointRow | None:
    """The checkpoint of a step, if it is durable."""
    row = tx.execute(
        f"SELECT {_FIELDS} FROM checkpoints "  # noqa: S608
        "WHERE run_id = %s AND step = %s AND state = 'durable'",
        (run, step),
    ).fetchone()
    return None if row is None else CheckpointRow(**row)


def retire(tx: Tx, run: str) -> list[CheckpointRow]:
    """Mark what is neither among the newest `checkpoint.keep` nor tagged.

    A fork and its parent name the same objects. Each lets go of them by itself, and whoever does so
    last deletes them: no new name can come up, for only a durable row can be forked. The caller
    deletes the objects of what is returned, then calls `deleted`; repeated until then.
    """
    keep = runs.lock(tx, run).config.checkpoint.keep
    # Two runs that let go of the same objects at once: one of them must see that it is the last.
    tx.execute(
        """
        SELECT 1 FROM checkpoints WHERE state <> 'deleted' AND s3_prefix IN (
            SELECT s3_prefix FROM checkpoints WHERE run_id = %s AND state <> 'deleted')
        ORDER BY run_id, step FOR NO KEY UPDATE
        """,
        (run,),
    )
    tx.execute(
        """
        UPDATE checkpoints c SET state = 'retiring' WHERE c.run_id = %(run)s
            AND c.state = 'durable' AND c.tag IS NULL AND c.step NOT IN (
                SELECT n.step FROM checkpoints n WHERE n.run_id = %(run)s AND n.state = 'durable'
                ORDER BY n.step DESC LIMIT %(keep)s)
        """,
        {"run": run, "keep": keep},
    )
    tx.execute(
        """
        UPDATE checkpoints c SET state = 'deleted' WHERE c.run_id = %s AND c.state = 'retiring'
            AND EXISTS (SELECT 1 FROM checkpoints f WHERE f.s3_prefix = c.s3_prefix
                AND f.run_id <> c.run_id AND f.state <> 'deleted')
        """,
        (run,),
    )
    rows = tx.execute(
        f"SELECT {_FIELDS} FROM checkpoints "  # noqa: S608
        "WHERE run_id = %s AND state = 'retiring' ORDER BY step",
        (run,),
    ).fetchall()
    return [CheckpointRow(**row) for row in rows]


def deleted(tx: Tx, run: str, steps: Sequence[int]) -> None:
    """Note that the objects of retiring checkpoints are gone."""
    tx.execute(
        "UPDATE checkpoints SET state = 'deleted' "
        "WHERE run_id = %s AND step = ANY(%s) AND state = 'retiring'",
        (run, list(steps)),
    )


def _insert(tx: Tx, run: str, row: CheckpointRow) -> None:
    tx.execute(
        """
        INSERT INTO checkpoints(run_id, step, version, s3_prefix, manifest_sha256, bytes,
            data_position, rng, world, trainer_epoch)
        VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
        """,
        (
            run,
            row.step,
            row.version,
            row.prefix,
            row.manifest_sha256,
            row.size,
            jsonb(row.data_position),
            jsonb(row.rng),
            jsonb(row.world),
            row.epoch,
        ),
    )
