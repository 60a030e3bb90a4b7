"""States that environments save at turn boundaries, so that a rollout survives its worker."""

from typing import Any

from domain.errors import Fenced
from domain.messages import AttemptIn
from storage.database import Tx, jsonb


def save(tx: Tx, i: AttemptIn, fence: int, *, segments: int, state: Any) -> None:
    """Keep a JSON value that describes the attempt after so many committed segments; older ones go.

    Raises:
        Fenced: another execution owns the attempt, or it has ended.
    """
    row = {
        "run": i.run,
        "group": i.group,
        "sample": i.sample,
        "attempt": i.attempt,
        "fence": fence,
        "segments": segments,
        "state": jsonb(state),
    }
    owned = tx.execute(
        """SELECT 1 FROM attempts
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s AND state = 'running' FOR NO KEY UPDATE""",
        row,
    ).fetchone()
    if owned is None:
        raise Fenced(
            f"attempt {i.attempt} at sample {i.sample} of group {i.group} does not run under "
            f"fence {fence} any more; this execution must stop writing"
        )
    tx.execute(
        """DELETE FROM snapshots
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND segments <= %(segments)s""",
        row,
    )
    tx.execute(
        """INSERT INTO snapshots(run_id, group_id, sample, attempt, segments, state)
        VALUES (%(run)s, %(group)s, %(sample)s, %(attempt)s, %(segments)s, %(state)s)""",
        row,
    )


def newest(tx: Tx, i: AttemptIn) -> Any | None:
    """The newest saved state of the attempt; None if there is none."""
    row = tx.execute(
        """SELECT state FROM snapshots
        WHERE (run_id, group_id, sample, attempt) = (%s, %s, %s, %s)
        ORDER BY segments DESC LIMIT 1""",
        (i.run, i.group, i.sample, i.attempt),
    ).fetchone()
    return None if row is None else row["state"]
