"""A rewind is a fork: a new run that starts from a durable checkpoint of its parent.

The parent is closed and keeps its history; no engine and no object key ever meets an older version
under a used name. Steps and versions go on counting. The child owes what the parent still owed
before that step: every group that no earlier step had trained, cut or seen closed. Tasks that are set
aside stay so.

The child may have another number of shares, since it is another run: a run has one world for all of
its life. What its parent drew is dealt out anew (`domain.shares.Division`); a batch that some share of
the parent had not come to, though others were further, is drawn when the child begins.
"""

from dataclasses import asdict
from typing import Any

from domain.config import RunConfig
from domain.errors import LedgerError
from domain.shares import Division, other_bits
from storage import checkpoints, runs
from storage.checkpoints import CheckpointRow
from storage.database import Tx, jsonb
from storage.runs import Run


def fork(tx: Tx, run: str, epoch: int, step: int | None, *, shares: int | None = None) -> str:
    """Close `run` and create its child at checkpoint `step`, state `closed`; the child's name.

    The next trainer resumes the child: it publishes the checkpoint's version, then hands over.

    Args:
        tx: a transaction.
        run: the parent.
        epoch: the fencing token of who forks it.
        step: a durable step; None for the last one, if no step has been applied after it.
        shares: trainer processes of the child; as many as the parent's by default.

    Raises:
        LedgerError: no durable checkpoint of that step; names those there are.
    """
    parent = runs.fence(tx, run, epoch)
    if step is None:
        step = _last(parent)
    shares = parent.shares if shares is None else shares
    start = checkpoints.at(tx, run, step)
    if start is None:
        raise LedgerError(_no_checkpoint(tx, run, step))
    runs.close(tx, run, epoch, "finished" if parent.state == "finished" else "closed")
    child = _free_name(tx, parent)
    before, after = _divisions(parent, start, shares)
    _create(tx, parent, child, start, after)
    _copy_start(tx, parent, child, start)
    _copy_owed(tx, parent, child, start, before, after)
    _copy_quarantine(tx, parent, child)
    tx.execute(
        "UPDATE runs SET durable_step = first_step, state = 'closed' WHERE run_id = %s", (child,)
    )
    return child


def _last(run: Run) -> int:
    """The step that is next and durable too.

    Raises:
        LedgerError: steps have been applied since; says how they become durable.
    """
    if run.durable_step != run.next_step:
        raise LedgerError(
            f"run {run.id} stands at step {run.next_step} and its last checkpoint is of step "
            f"{run.durable_step}: the steps between can only be recomputed by as many ranks as made "
            f"them ({run.shares}). `rollbook resume {run.id}` does; stop it with Ctrl-C, which writes "
            f"a checkpoint, then change the ranks. Or go back with --from-step {run.durable_step}"
        )
    return run.next_step


def _divisions(parent: Run, start: CheckpointRow, shares: int) -> tuple[Division, Division]:
    """How the data is divided before the fork and after it."""
    before = Division.of(parent.world, parent.shares)
    if shares == parent.shares:
        return before, before
    ordered = parent.config.schedule.order == "dataset"
    return before, before.among(shares, step=start.step, ordered=ordered)


def _no_checkpoint(tx: Tx, run: str, step: int) -> str:
    rows = tx.execute(
        "SELECT step FROM checkpoints WHERE run_id = %s AND state = 'durable' ORDER BY step", (run,)
    ).fetchall()
    have = ", ".join(str(row["step"]) for row in rows) or "none"
    return f"run {run} has no durable checkpoint {step}; choose one of: {have}"


def _free_name(tx: Tx, parent: Run) -> str:
    """The root's name with the next free number."""
    stem = parent.id.rpartition(".")[0] if parent.parent is not None else parent.id
    taken = {row["run_id"] for row in tx.execute("SELECT run_id FROM runs").fetchall()}
    number = 2
    while f"{stem}.{number}" in taken:
        number += 1
    return f"{stem}.{number}"


def _create(tx: Tx, parent: Run, child: str, start: CheckpointRow, division: Division) -> None:
    row = tx.execute("SELECT has_verifier FROM runs WHERE run_id = %s", (parent.id,)).fetchone()
    assert row is not None
    shares = division.shares
    changed = shares != parent.shares
    runs.create(
        tx,
        _renamed(parent, child, shares),
        world=_world(parent, division) if changed else parent.world,
        shares=shares,
        has_verifier=row["has_verifier"],
        columns={
            "parent": parent.id,
            "forked_at": start.step,
            "first_step": start.step,
            "next_step": start.step,
            "empty_from": start.step,
            "first_version": start.version,
            "version": start.version,
        },
    )
    if changed:
        inexact = other_bits(parent.shares, shares, start.step)
        told = {"from": parent.shares, "to": shares, "parent": parent.id, "inexact": inexact}
        tx.execute(
            "INSERT INTO events(run_id, kind, version, step, data) VALUES (%s, %s, %s, %s, %s)",
            (child, "run.ranks", start.version, start.step, jsonb(told)),
        )


def _renamed(parent: Run, child: str, shares: int) -> RunConfig:
    config, trainer = parent.config, parent.config.trainer
    if shares != parent.shares:
        ranks = shares * trainer.readers
        # One process holds everything by itself, and so does not divide it.
        parallel = trainer.parallel if ranks > 1 else "ddp"
        trainer = trainer.model_copy(update={"ranks": ranks, "parallel": parallel})
    return config.model_copy(update={"name": child, "trainer": trainer})


def _world(parent: Run, division: Division) -> dict[str, Any]:
    """What the bits of another number of ranks depend on: as many threads in all, each its part."""
    world = dict(parent.world)
    world["shares"], world["shares_before"] = division.shares, parent.shares
    world["division"] = division.origin()
    if "threads" in world and parent.config.trainer.threads is None:
        world["threads"] = max(1, int(world["threads"]) * parent.shares // division.shares)
    return world


def _copy_start(tx: Tx, parent: Run, child: str, start: CheckpointRow) -> None:
    """The checkpoint and its version, which name the parent's objects.

    If the parent never uploaded these weights, or they were retired, the version is `computed` and
    the child's trainer uploads them.
    """
    tx.execute(
        """
        INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, weights_bytes,
            probe, state, trainer_epoch, uploaded_at)
        SELECT %(child)s, version, weights_sha256, k.key, CASE WHEN k.key IS NOT NULL
                THEN weights_bytes END, CASE WHEN k.key IS NOT NULL THEN probe END,
            CASE WHEN k.key IS NULL THEN 'computed' ELSE 'uploaded' END, 0, uploaded_at
        FROM policy_versions, LATERAL (SELECT CASE WHEN state IN
            ('uploaded', 'loading', 'served', 'draining') THEN weights_key END AS key) k
        WHERE run_id = %(parent)s AND version = %(version)s
        """,
        {"child": child, "parent": parent.id, "version": start.version},
    )
    tx.execute(
        """
        INSERT INTO checkpoints(run_id, step, version, s3_prefix, manifest_sha256, bytes,
            data_position, rng, world, trainer_epoch)
        SELECT %s, step, version, s3_prefix, manifest_sha256, bytes, data_position, rng, world, 0
        FROM checkpoints WHERE run_id = %s AND step = %s
        """,
        (child, parent.id, start.step),
    )


def _copy_owed(
    tx: Tx, parent: Run, child: str, start: CheckpointRow, before: Division, after: Division
) -> None:
    """Every batch the parent drew, and those of their groups that were owed before the step.

    Also batches drawn after the checkpoint: the child's trainer reads the data again from the
    checkpoint's position, and what it reads must be what the parent read. A group of two parts is
    done when any part was trained before that step. Of a batch keep its place in the whole data, and
    its groups their numbers, whichever share they fall to; in data order another division begins
    with the first batch that is not done.
    """
    values = {
        "child": child,
        "parent": parent.id,
        "step": start.step,
        **{f"{key}_before": value for key, value in asdict(before).items()},
        **{f"{key}_after": value for key, value in asdict(after).items()},
    }
    tx.execute(
        """
        CREATE TEMPORARY TABLE dealt ON COMMIT DROP AS
        SELECT b.batch AS old_batch, b.share AS old_share,
            (%(batch_after)s + (w.whole - %(whole_after)s) / %(shares_after)s)::int AS batch,
            ((w.whole - %(whole_after)s) %% %(shares_after)s)::int AS share
        FROM task_batches b, LATERAL (SELECT %(whole_before)s
            + (b.batch - %(batch_before)s) * %(shares_before)s + b.share AS whole) w
        WHERE b.run_id = %(parent)s
            AND (%(shares_after)s = %(shares_before)s OR w.whole >= %(whole_after)s)
        """,
        values,
    )
    tx.execute(
        """
        CREATE TEMPORARY TABLE owed ON COMMIT DROP AS SELECT g.* FROM groups g
        WHERE g.run_id = %(parent)s AND NOT coalesce(g.closed_step < %(step)s, false)
            AND NOT EXISTS (SELECT 1 FROM queue q
                WHERE (q.run_id, q.group_id) = (g.run_id, g.group_id) AND q.step < %(step)s)
            AND NOT (EXISTS (SELECT 1 FROM queue q
                WHERE (q.run_id, q.group_id) = (g.run_id, g.group_id)
                    AND q.state = 'cut' AND q.closed_step < %(step)s)
                AND NOT EXISTS (SELECT 1 FROM queue q
                WHERE (q.run_id, q.group_id) = (g.run_id, g.group_id)
                    AND q.state IN ('admitted', 'planned', 'applied', 'trained')))
        """,
        values,
    )
    tx.execute(
        """
        INSERT INTO task_batches(run_id, batch, share, tasks, groups, data_position, content_sha256)
        SELECT %(child)s, d.batch, d.share, b.tasks,
            (SELECT count(*) FROM owed o WHERE (o.batch, o.share) = (b.batch, b.share)),
            b.data_position, b.content_sha256
        FROM task_batches b JOIN dealt d ON (d.old_batch, d.old_share) = (b.batch, b.share)
        WHERE b.run_id = %(parent)s
        """,
        values,
    )
    tx.execute(
        """
        INSERT INTO groups(run_id, group_id, batch, share, pos, environment, task_id, task)
        SELECT %(child)s, o.group_id, d.batch, d.share, o.pos, o.environment, o.task_id, o.task
        FROM owed o JOIN dealt d ON (d.old_batch, d.old_share) = (o.batch, o.share) ORDER BY group_id
        """,
        values,
    )


def _copy_quarantine(tx: Tx, parent: Run, child: str) -> None:
    """What a person has not released: the child would only find it out again, group by group."""
    tx.execute(
        """
        INSERT INTO quarantine(run_id, task_id, phase, reason, task_sha256, at)
        SELECT %s, task_id, phase, reason, task_sha256, at FROM quarantine
        WHERE run_id = %s AND released_at IS NULL
        """,
        (child, parent.id),
    )
