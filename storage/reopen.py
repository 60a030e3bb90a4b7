"""Opening a group again: some of its members grew too old, or its workflow is gone.

Good members are kept and only the missing samples run again, under a new generation; what the old
workflow still reports loses its compare-and-set. Bounds end it: `max_stale` stale resubmissions of
one sample expire the group, `max_losses` losses abandon it. A generation that is lost before any of
its rollouts ran is one loss too, or a group that can never start would be opened for ever.
"""

from typing import Any, Literal

from storage import queue, runs, submission, versions
from storage.database import Tx
from storage.runs import Run

Cause = Literal["stale", "lost"]


def reopen(tx: Tx, run: str, group: int, gen: int, *, cause: Cause) -> bool:
    """Re-open one generation of a group; False if that generation is over already.

    `stale`: the group is complete and a member's oldest token is too old to train. `lost`: the
    group is submitted and its workflow no longer exists; after the straggler deadline nothing runs
    again, and the group completes with the members it has.
    """
    row = tx.execute(
        "SELECT state, gen, deadline_reached_at FROM groups WHERE run_id = %s AND group_id = %s "
        "FOR NO KEY UPDATE",
        (run, group),
    ).fetchone()
    wanted = "complete" if cause == "stale" else "submitted"
    if row is None or row["gen"] != gen or row["state"] != wanted:
        return False
    owner = runs.read(tx, run)
    if cause == "stale" and not _withdraw(tx, owner, group):
        return False
    tx.execute(
        "SELECT 1 FROM attempts WHERE run_id = %s AND group_id = %s "
        "ORDER BY sample, attempt FOR NO KEY UPDATE",
        (run, group),
    )
    lost = _end_live(tx, run, group)
    if cause == "lost":
        tx.execute(
            "UPDATE groups SET losses = losses + greatest(1, %s) WHERE (run_id, group_id) = (%s, %s)",
            (len(lost), run, group),
        )
    if cause == "lost" and row["deadline_reached_at"] is not None:
        _complete(tx, run, group)
        return True
    stale = _drop_stale(tx, owner, group)
    if cause == "stale":
        tx.execute(
            "UPDATE attempts SET part = NULL WHERE run_id = %s AND group_id = %s AND member",
            (run, group),
        )
    bound = _bound_reached(tx, owner, group, stale)
    if bound is not None:
        state, why = bound
        tx.execute(
            "UPDATE groups SET state = %s, closed_cause = %s, closed_step = %s "
            "WHERE run_id = %s AND group_id = %s",
            (state, why, owner.next_step, run, group),
        )
        return True
    served = versions.served(tx, run)
    assert served is not None  # nothing is ever submitted before a version is served
    prefer = stale or lost
    samples = submission.missing_samples(tx, owner, group, prefer=prefer)
    tx.execute(
        "UPDATE attempts SET resubmitted_as = 'infra_error' WHERE run_id = %s AND group_id = %s "
        "AND gen = %s AND state = 'lost' AND sample = ANY(%s) AND resubmitted_as IS NULL",
        (run, group, gen, samples),
    )
    submission.submit(tx, owner, group, samples, served, reopened=True)
    return True


def _withdraw(tx: Tx, run: Run, group: int) -> bool:
    """Take the admitted row back; False if the group is planned already, hence bound for ever."""
    tx.execute(
        "SELECT 1 FROM queue WHERE run_id = %s AND group_id = %s ORDER BY part, gen "
        "FOR NO KEY UPDATE",
        (run.id, group),
    )
    withdrawn = tx.execute(
        "UPDATE queue SET state = 'expired', cause = 'stale_member', closed_step = %s "
        "WHERE run_id = %s AND group_id = %s AND state = 'admitted'",
        (run.next_step, run.id, group),
    )
    return withdrawn.rowcount > 0


def _end_live(tx: Tx, run: str, group: int) -> list[int]:
    """End the live attempts: running ones are lost, the others cancelled. The samples lost.

    An attempt that is lost was killed by the platform: it is counted, but it is no failure.
    """
    rows = tx.execute(
        """
        UPDATE attempts SET finished_at = now(),
            state = CASE WHEN state = 'running' AND cancel_cause IS NULL
                THEN 'lost' ELSE 'finished' END,
            status = CASE WHEN state = 'running' AND cancel_cause IS NULL
                THEN 'infra_error' ELSE 'cancelled' END::rollout_status
        WHERE run_id = %s AND group_id = %s AND state IN ('submitted', 'running')
        RETURNING sample, state
        """,
        (run, group),
    ).fetchall()
    return sorted(row["sample"] for row in rows if row["state"] == "lost")


def _drop_stale(tx: Tx, run: Run, group: int) -> list[int]:
    """Take members that are too old to train out of the group; their samples."""
    schedule = run.config.schedule
    if schedule.stale_policy not in ("resubmit", "wait"):
        return []
    rows = tx.execute(
        """
        UPDATE attempts SET member = false, part = NULL, resubmitted_as = 'stale'
        WHERE run_id = %s AND group_id = %s AND member
            AND coalesce(oldest_version, pinned_version, submitted_version) < %s
        RETURNING sample
        """,
        (run.id, group, run.version - schedule.max_lag),
    ).fetchall()
    return sorted(row["sample"] for row in rows)


def _bound_reached(
    tx: Tx, run: Run, group: int, stale: list[int]
) -> tuple[Literal["expired", "abandoned"], str] | None:
    groups = run.config.groups
    row: dict[str, Any] | None = tx.execute(
        """
        SELECT g.losses, (SELECT coalesce(max(n), 0) FROM (
            SELECT count(*) AS n FROM attempts a WHERE a.run_id = g.run_id
                AND a.group_id = g.group_id AND a.resubmitted_as = 'stale'
                AND a.sample = ANY(%s) GROUP BY a.sample) s) AS stale
        FROM groups g WHERE g.run_id = %s AND g.group_id = %s
        """,
        (stale, run.id, group),
    ).fetchone()
    assert row is not None
    if row["losses"] >= groups.max_losses:
        return "abandoned", "max_losses"
    if row["stale"] >= groups.max_stale:
        return "expired", "max_stale"
    return None


def _complete(tx: Tx, run: str, group: int) -> None:
    """Close a group whose deadline has passed with the members that finished."""
    first = tx.execute(
        "SELECT 1 FROM queue WHERE run_id = %s AND group_id = %s AND part = 0 "
        "AND state <> 'expired'",
        (run, group),
    ).fetchone()
    queue.admit(tx, run, group, 0 if first is None else 1)
    tx.execute(
        "UPDATE groups SET state = 'complete' WHERE run_id = %s AND group_id = %s", (run, group)
    )
