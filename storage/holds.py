"""Holds under `stale_policy = "wait"`: which group binds a step, since when, and the slack left.

A hold is an event `steps.held` of its step, written when another group begins to bind, so that
people can see afterwards what the trainer waited for. The seconds are in the step's record.
"""

from datetime import datetime
from typing import Any

from domain.planning import Hold
from domain.staleness import slack
from storage.database import Tx, jsonb
from storage.runs import Run


def note(tx: Tx, run: str, step: int, hold: Hold) -> None:
    """Write that the step is held, once per group that binds it."""
    group = hold.binding_groups[0]
    tx.execute(
        """
        INSERT INTO events(run_id, kind, group_id, step, data)
        SELECT %(run)s, 'steps.held', %(group)s, %(step)s, %(data)s WHERE NOT EXISTS (
            SELECT 1 FROM events WHERE (run_id, group_id) = (%(run)s, %(group)s)
                AND kind = 'steps.held' AND step = %(step)s)
        """,
        {
            "run": run,
            "group": group,
            "step": step,
            "data": jsonb(
                {
                    "deadline": hold.binding_deadline,
                    "slack": hold.slack,
                    "groups": list(hold.binding_groups),
                }
            ),
        },
    )


def binding(tx: Tx, run: str, share: int = 0) -> tuple[int, datetime] | None:
    """The group that binds a share's next step, and since when; None when nothing holds it."""
    row = tx.execute(
        """
        SELECT e.group_id, e.at FROM runs r JOIN outstanding o USING (run_id)
        JOIN events e ON (e.run_id, e.group_id, e.step) = (r.run_id, o.group_id, r.next_step)
        WHERE (o.run_id, o.share) = (%s, %s) AND r.stale_policy = 'wait' AND e.kind = 'steps.held'
        ORDER BY e.id DESC LIMIT 1
        """,
        (run, share),
    ).fetchone()
    return None if row is None else (row["group_id"], row["at"])


def gauge(tx: Tx, run: Run) -> dict[str, float]:
    """`staleness/slack`: places left at the tightest deadline as the trainer advances.

    Measured over what is outstanding beside the step in training, in the share that has the least;
    empty under other policies.
    """
    schedule = run.config.schedule
    if schedule.stale_policy != "wait":
        return {}
    rows: list[dict[str, Any]] = tx.execute(
        "SELECT share, version FROM outstanding WHERE run_id = %s", (run.id,)
    ).fetchall()
    versions: dict[int, list[int]] = {share: [] for share in range(run.shares)}
    for row in rows:
        versions[row["share"]].append(row["version"])
    batch = run.config.tasks.batch_size
    left = (slack(run.version, batch, schedule.max_lag, own) for own in versions.values())
    return {"staleness/slack": float(min(left))}
