"""What the steward settles in the ledger when an execution can no longer do it itself.

Each is a compare-and-set: an execution that comes back meanwhile wins or is fenced, never both.
"""

from datetime import date, timedelta

from psycopg import errors, sql

from storage.census import Silent
from storage.database import Tx


def end_cancelled(tx: Tx, attempt: Silent) -> bool:
    """Finish an attempt that was told to stop and whose workflow is gone; False: it has moved on."""
    return _end(tx, attempt, "finished", "cancelled")


def lose(tx: Tx, attempt: Silent) -> bool:
    """Write an attempt off that no workflow answers for; a loss, no failure. False: it moved on."""
    tx.execute(
        "SELECT 1 FROM groups WHERE (run_id, group_id) = (%s, %s) FOR NO KEY UPDATE",
        (attempt.run, attempt.group),
    )
    if not _end(tx, attempt, "lost", "infra_error"):
        return False
    tx.execute(
        "UPDATE groups SET losses = losses + 1 WHERE (run_id, group_id) = (%s, %s)",
        (attempt.run, attempt.group),
    )
    return True


def add_event_partitions(tx: Tx, today: date, *, days: int = 3) -> int:
    """Make the partitions of the coming days, today's excepted; how many are new.

    Rows of a day without a partition stand in the default one, which then bars that day's
    partition: such a day is left as it is. Needs no lock longer than two seconds.
    """
    tx.execute("SET LOCAL lock_timeout = '2s'")
    made = 0
    for ahead in range(1, days + 1):
        first = today + timedelta(days=ahead)
        name = f"events_{first:%Y%m%d}"
        if tx.execute("SELECT to_regclass(%s) AS found", (name,)).fetchone() != {"found": None}:
            continue
        try:
            with tx.transaction():
                tx.execute(
                    sql.SQL(
                        "CREATE TABLE {} PARTITION OF events FOR VALUES FROM ({}) TO ({})"
                    ).format(
                        sql.Identifier(name),
                        sql.Literal(first.isoformat()),
                        sql.Literal((first + timedelta(days=1)).isoformat()),
                    )
                )
        except errors.CheckViolation:
            continue
        made += 1
    return made


def _end(tx: Tx, attempt: Silent, state: str, status: str) -> bool:
    row = tx.execute(
        """
        UPDATE attempts SET fence = fence + 1, state = %s, status = %s::rollout_status,
            surplus = surplus OR coalesce(cancel_cause = 'surplus', false),
            finished_at = clock_timestamp()
        WHERE (run_id, group_id, sample, attempt, fence) = (%s, %s, %s, %s, %s)
            AND state = 'running'
        RETURNING 1
        """,
        (
            state,
            status,
            attempt.run,
            attempt.group,
            attempt.sample,
            attempt.attempt,
            attempt.fence,
        ),
    ).fetchone()
    return row is not None
