"""Stopping attempts: those that queue end at once, those that run are told by ledger and signal.

A running attempt sees `cancel_cause` at its next segment boundary, whatever becomes of the signal.
Nothing here counts as a failure. Callers hold the locks of the groups they name.
"""

from collections.abc import Sequence
from typing import Literal

from storage import outbox
from storage.database import Tx

Cause = Literal["stale", "surplus", "close", "reopen", "abandon", "resident_limit", "human"]


def stop_attempts(tx: Tx, run: str, groups: Sequence[int], cause: Cause) -> None:
    """Cancel every live attempt of these groups."""
    where = {"run": run, "groups": list(groups), "cause": cause, "surplus": cause == "surplus"}
    tx.execute(
        "SELECT 1 FROM attempts WHERE run_id = %(run)s AND group_id = ANY(%(groups)s) "
        "AND state IN ('submitted', 'running') ORDER BY group_id, sample, attempt "
        "FOR NO KEY UPDATE",
        where,
    )
    tx.execute(
        """
        UPDATE attempts SET cancel_cause = coalesce(cancel_cause, %(cause)s),
            cancel_requested_at = coalesce(cancel_requested_at, now()),
            surplus = surplus OR (%(surplus)s AND cancel_cause IS NULL),
            state = CASE state WHEN 'submitted' THEN 'finished' ELSE state END,
            status = CASE state WHEN 'submitted' THEN 'cancelled'::rollout_status END,
            finished_at = CASE state WHEN 'submitted' THEN now() END
        WHERE run_id = %(run)s AND group_id = ANY(%(groups)s) AND state IN ('submitted', 'running')
        """,
        where,
    )


def signal_attempts(
    tx: Tx, run: str, attempts: Sequence[tuple[int, int, int]], cause: Cause
) -> None:
    """Cancel these running `(group, sample, attempt)` and have their workflows told."""
    rows = []
    for group, sample, attempt in sorted(attempts):
        row = tx.execute(
            """
            UPDATE attempts a SET cancel_cause = %s, cancel_requested_at = now() FROM groups g
            WHERE (a.run_id, a.group_id, a.sample, a.attempt) = (%s, %s, %s, %s)
                AND a.state = 'running' AND a.cancel_cause IS NULL
                AND (g.run_id, g.group_id) = (a.run_id, a.group_id)
            RETURNING g.workflow_id
            """,
            (cause, run, group, sample, attempt),
        ).fetchone()
        if row is not None and row["workflow_id"] is not None:
            rows.append((row["workflow_id"], sample, attempt))
    outbox.add(
        tx,
        run,
        "cancel_sample",
        [
            (
                f"{workflow}/s{sample}.a{attempt}",
                {"workflow_id": workflow, "sample": sample, "attempt": attempt, "cause": cause},
            )
            for workflow, sample, attempt in rows
        ],
    )


def close_workflows(tx: Tx, run: str, workflows: Sequence[str], cause: Cause) -> None:
    """Have these workflows end their groups' sampling."""
    outbox.add(
        tx,
        run,
        "close_group",
        [(key, {"workflow_id": key, "cause": cause}) for key in workflows],
    )


def return_groups(tx: Tx, run: str, cause: Literal["close", "reopen"]) -> int:
    """Make every submitted group `registered` again, keeping its finished members; their number.

    The generation grows, so that whatever the old workflow still reports loses its
    compare-and-set. Nothing becomes `cancelled`: the groups are still owed.
    """
    groups = tx.execute(
        "SELECT group_id, workflow_id FROM groups WHERE run_id = %s AND state = 'submitted' "
        "ORDER BY group_id FOR NO KEY UPDATE",
        (run,),
    ).fetchall()
    if not groups:
        return 0
    ids = [group["group_id"] for group in groups]
    stop_attempts(tx, run, ids, cause)
    tx.execute(
        """
        UPDATE groups SET state = 'registered', gen = gen + 1, workflow_id = NULL, begun_at = NULL,
            submitted_version = NULL, submitted_at = NULL, quorum_at = NULL,
            deadline_reached_at = NULL
        WHERE run_id = %s AND group_id = ANY(%s)
        """,
        (run, ids),
    )
    close_workflows(tx, run, [group["workflow_id"] for group in groups], cause)
    return len(groups)


def in_flight(tx: Tx, run: str) -> int:
    """Attempts that still run, whatever they have been told."""
    row = tx.execute(
        "SELECT count(*) AS n FROM attempts WHERE run_id = %s AND state = 'running'", (run,)
    ).fetchone()
    assert row is not None
    return int(row["n"])
