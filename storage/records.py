"""What a step's record says about the rollouts around it, counted from the ledger.

Counts run from the beginning of the run; a record holds them beside its differences to the record
before it (`since`), so that every resubmission and cancellation appears in exactly one record, also
over crashes and resumes.
"""

from collections.abc import Mapping
from typing import Any

from storage.database import Tx

CAUSES = ("infra_error", "cancelled", "stale", "timeout", "unscored")


def totals(tx: Tx, run: str) -> dict[str, int]:
    """Counts up to now: resubmissions by cause, and what was cancelled, abandoned or cut.

    `cancelled` are attempts: surplus, stale, timed out, and those of groups that were abandoned.
    `abandoned` and `cut` are groups.
    """
    attempts = tx.execute(
        """
        SELECT count(*) FILTER (WHERE resubmitted_as = 'infra_error') AS infra_error,
            count(*) FILTER (WHERE resubmitted_as = 'cancelled') AS cancelled_by_source,
            count(*) FILTER (WHERE resubmitted_as = 'stale') AS stale,
            count(*) FILTER (WHERE resubmitted_as = 'timeout') AS timeout,
            count(*) FILTER (WHERE resubmitted_as = 'unscored') AS unscored,
            count(*) FILTER (WHERE surplus OR resubmitted_as = 'timeout'
                OR cancel_cause IN ('surplus', 'stale', 'abandon')) AS cancelled
        FROM attempts WHERE run_id = %s
        """,
        (run,),
    ).fetchone()
    places = tx.execute("SELECT abandoned, cut FROM balance WHERE run_id = %s", (run,)).fetchone()
    assert attempts is not None
    assert places is not None
    return dict(attempts) | dict(places)


def since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, Any]:
    """The counts of one record: those of `now` that `before` does not hold yet."""
    new = {name: count - before.get(name, 0) for name, count in now.items()}
    by_cause = {c: new["cancelled_by_source" if c == "cancelled" else c] for c in CAUSES}
    return {
        "resubmitted": by_cause,
        "cancelled": new["cancelled"],
        "abandoned": new["abandoned"],
        "cut": new["cut"],
    }


def last(tx: Tx, run: str, step: int) -> Mapping[str, Any]:
    """The record of the newest applied step before `step`; empty if there is none."""
    row = tx.execute(
        "SELECT record FROM step_shares WHERE run_id = %s AND step < %s AND share = 0 "
        "AND record IS NOT NULL ORDER BY step DESC LIMIT 1",
        (run, step),
    ).fetchone()
    return {} if row is None else dict(row["record"])


def latencies(tx: Tx, run: str, step: int) -> list[float]:
    """Seconds from submission to finish of each rollout that a step trains."""
    rows = tx.execute(
        """
        SELECT extract(epoch FROM a.finished_at - a.submitted_at)::float AS seconds
        FROM queue q JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part)
        WHERE q.run_id = %s AND q.step = %s AND a.member AND a.finished_at IS NOT NULL
        """,
        (run, step),
    ).fetchall()
    return [row["seconds"] for row in rows]


def oldest(tx: Tx, run: str, step: int) -> int | None:
    """The oldest version among the groups that a step trains."""
    row = tx.execute(
        "SELECT min(oldest_version) AS version FROM queue WHERE run_id = %s AND step = %s",
        (run, step),
    ).fetchone()
    return None if row is None else row["version"]


def cancelled_tokens(tx: Tx, run: str, step: int) -> list[int]:
    """Sampled ids of each rollout that was cancelled because a step's groups were complete first."""
    rows = tx.execute(
        """
        SELECT a.policy_tokens FROM attempts a WHERE a.run_id = %(run)s AND a.group_id IN (
                SELECT q.group_id FROM queue q WHERE q.run_id = %(run)s AND q.step = %(step)s
                UNION SELECT g.group_id FROM groups g WHERE g.run_id = %(run)s
                    AND g.closed_step = %(step)s AND g.closed_cause = 'surplus')
            AND NOT a.member AND (a.surplus OR a.cancel_cause = 'surplus')
        """,
        {"run": run, "step": step},
    ).fetchall()
    return [row["policy_tokens"] for row in rows]


def environment_metrics(tx: Tx, run: str, step: int) -> dict[str, float]:
    """The environments' own measurements over the rollouts that a step trains: sums by name."""
    rows = tx.execute(
        """
        SELECT m.key, sum(m.value::text::float) AS total
        FROM queue q JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part),
            jsonb_each(a.metrics) AS m
        WHERE q.run_id = %s AND q.step = %s AND a.member AND jsonb_typeof(m.value) = 'number'
        GROUP BY 1 ORDER BY 1
        """,
        (run, step),
    ).fetchall()
    return {f"environment/{row['key']}": row["total"] for row in rows}
