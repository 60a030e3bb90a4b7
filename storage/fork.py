"""A rewind is a fork: a new run that starts from a durable checkpoint of its parent.

The parent is closed and keeps its history; no engine and no object key ever meets an older version
under a used name. Steps and versions go on counting. The child owes what the parent still owed
before that step: every group that no earlier step had trained, cut or seen closed. Tasks that are set
aside stay so.
"""

from domain.errors import LedgerError
from storage import checkpoints, runs
from storage.checkpoints import CheckpointRow
from storage.database import Tx
from storage.runs import Run


def fork(tx: Tx, run: str, epoch: int, step: int) -> str:
    """Close `run` and create its child at checkpoint `step`, state `closed`; the child's name.

    The next trainer resumes the child: it publishes the checkpoint's version, then hands over.

    Raises:
        LedgerError: no durable checkpoint of that step; names those there are.
    """
    parent = runs.fence(tx, run, epoch)
    start = checkpoints.at(tx, run, step)
    if start is None:
        raise LedgerError(_no_checkpoint(tx, run, step))
    runs.close(tx, run, epoch, "finished" if parent.state == "finished" else "closed")
    child = _free_name(tx, parent)
    _create(tx, parent, child, start)
    _copy_start(tx, parent, child, start)
    _copy_owed(tx, parent, child, start)
    _copy_quarantine(tx, parent, child)
    tx.execute(
        "UPDATE runs SET durable_step = first_step, state = 'closed' WHERE run_id = %s", (child,)
    )
    return child


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


def _create(tx: Tx, parent: Run, child: str, start: CheckpointRow) -> None:
    row = tx.execute("SELECT has_verifier FROM runs WHERE run_id = %s", (parent.id,)).fetchone()
    assert row is not None
    runs.create(
        tx,
        parent.config.model_copy(update={"name": child}),
        world=parent.world,
        shares=parent.shares,
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


def _copy_owed(tx: Tx, parent: Run, child: str, start: CheckpointRow) -> None:
    """Every batch the parent drew, and those of their groups that were owed before the step.

    Also batches drawn after the checkpoint: the child's trainer reads the data again from the
    checkpoint's position, and what it reads must be what the parent read. A group of two parts is
    done when any part was trained before that step.
    """
    values = {"child": child, "parent": parent.id, "step": start.step}
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
        SELECT %(child)s, b.batch, b.share, b.tasks,
            (SELECT count(*) FROM owed o WHERE (o.batch, o.share) = (b.batch, b.share)),
            b.data_position, b.content_sha256
        FROM task_batches b WHERE b.run_id = %(parent)s
        """,
        values,
    )
    tx.execute(
        """
        INSERT INTO groups(run_id, group_id, batch, share, pos, environment, task_id, task)
        SELECT %(child)s, group_id, batch, share, pos, environment, task_id, task FROM owed ORDER BY group_id
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
