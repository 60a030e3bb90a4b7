"""When a run stops because nothing it samples can be trained.

An empty step, a group that ended without training, or one whose rewards do not differ is normal;
too many in a row mean that the environment, the budgets, the rows or the verifier are wrong, and
the run fails with the causes it counted.
"""

from collections.abc import Sequence

from storage.database import Tx
from storage.runs import Run

ERROR_LIMIT = 300
"""Characters of an attempt's error that a failure of the run repeats."""


def empty_steps(tx: Tx, run: Run, step: int) -> str | None:
    """The failure, if the steps up to `step` were empty more than `max_empty_batches` times.

    Counted back to the last step with a group, or to the last resume of a failed run.
    """
    limit = run.config.schedule.max_empty_batches
    row = tx.execute(
        """
        SELECT %(step)s - coalesce(max(step), %(from)s - 1) AS n FROM steps
        WHERE run_id = %(run)s AND groups > 0 AND step BETWEEN %(from)s AND %(step)s
        """,
        {"run": run.id, "step": step, "from": run.empty_from},
    ).fetchone()
    assert row is not None
    if row["n"] <= limit:
        return None
    first = step - row["n"] + 1
    ended = tx.execute(
        """SELECT group_id FROM groups WHERE run_id = %(run)s AND closed_step >= %(first)s
        UNION SELECT group_id FROM queue
        WHERE run_id = %(run)s AND closed_step >= %(first)s AND state = 'cut'""",
        {"run": run.id, "first": first},
    ).fetchall()
    causes = _causes(tx, run.id, [group["group_id"] for group in ended])
    return (
        f"{row['n']} steps in a row had no group to train, more than schedule.max_empty_batches = "
        f"{limit}: {causes}; see `rollbook inspect {run.id}`"
    )


def unadmitted_groups(tx: Tx, run: Run) -> str | None:
    """The failure, if more than max_empty_batches·B groups in a row were abandoned or expired.

    Counted since the last admission, or the last resume of a failed run.
    """
    limit = run.config.schedule.max_empty_batches * run.config.tasks.batch_size
    row = tx.execute(
        """
        SELECT count(*) AS n, array_agg(g.group_id) AS ended FROM groups g JOIN runs r USING (run_id)
        WHERE g.run_id = %(run)s AND g.state IN ('abandoned', 'expired')
            AND g.updated_at > greatest(r.resumed_at, (
                SELECT max(q.admitted_at) FROM queue q WHERE q.run_id = %(run)s))
        """,
        {"run": run.id},
    ).fetchone()
    assert row is not None
    if row["n"] <= limit:
        return None
    causes = _causes(tx, run.id, row["ended"])
    return (
        f"{row['n']} groups in a row ended without training, more than "
        f"schedule.max_empty_batches x tasks.batch_size = {limit}: {causes}; see "
        f"`rollbook inspect {run.id}`"
    )


def filtered_groups(tx: Tx, run: Run, share: int) -> str | None:
    """The failure, if more than max_filtered_batches·B groups in a row were cut for equal rewards.

    Counted in completion order since the last group of this share that had something to teach, or
    since the last resume of a failed run.
    """
    schedule = run.config.schedule
    limit = schedule.max_filtered_batches * run.config.tasks.batch_size
    row = tx.execute(
        """
        SELECT count(*) AS n FROM queue q JOIN runs r USING (run_id)
        WHERE q.run_id = %(run)s AND q.share = %(share)s AND q.cause = 'zero_variance'
            AND q.admitted_at > r.resumed_at AND q.admitted_seq > (
                SELECT coalesce(max(u.admitted_seq), 0) FROM queue u WHERE u.run_id = %(run)s
                AND u.share = %(share)s AND u.cause IS DISTINCT FROM 'zero_variance')
        """,
        {"run": run.id, "share": share},
    ).fetchone()
    assert row is not None
    if row["n"] <= limit:
        return None
    return (
        f"{row['n']} groups in a row had equal rewards and were left out, more than "
        f"schedule.max_filtered_batches x tasks.batch_size = {limit}: the verifier does not tell "
        f"rollouts apart, or every task is too easy or too hard. Look at the rewards (`rollbook "
        f"inspect {run.id}`); correct the verifier and resume, or start a run with other tasks, a "
        "larger groups.size, or without schedule.filter_zero_variance"
    )


def _causes(tx: Tx, run: str, groups: Sequence[int]) -> str:
    """How these groups ended, and the error that their attempts met most."""
    those = {"run": run, "groups": list(groups), "limit": ERROR_LIMIT}
    rows = tx.execute(
        """
        SELECT what, cause, count(*) AS n FROM (
            SELECT state AS what, closed_cause AS cause FROM groups
            WHERE run_id = %(run)s AND group_id = ANY(%(groups)s) AND state <> 'cut'
            UNION ALL
            SELECT state, cause FROM queue
            WHERE run_id = %(run)s AND group_id = ANY(%(groups)s) AND state = 'cut') ended
        GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2
        """,
        those,
    ).fetchall()
    causes = ", ".join(f"{r['n']} {r['what']} ({r['cause']})" for r in rows) or "none was drawn"
    error = tx.execute(
        """
        SELECT concat_ws(': ', error_type, left(error, %(limit)s)) AS told FROM attempts
        WHERE run_id = %(run)s AND group_id = ANY(%(groups)s) AND status = 'infra_error'
            AND error IS NOT NULL
        GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT 1
        """,
        those,
    ).fetchone()
    return causes if error is None else f"{causes}, most often after {error['told']}"
