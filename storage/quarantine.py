"""Poison tasks: set aside when their own failures keep abandoning their groups, released by a person.

    abandoned, abandoned, abandoned ──set_aside──▶ quarantined ──release──▶ drawn again

What counts is a group that was abandoned because its samples failed too often (`max_attempts`), never
one that the platform lost. And it counts only if the platform worked meanwhile: from the first failure
until half a minute after the last, more rollouts of other tasks were scored than failed. So neither a
dead engine nor a verifier that is down for everybody puts a task into quarantine, and a task that is
alone has nothing to be compared with and stays.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from domain.errors import ConfigError
from storage import runs
from storage.database import Tx, canonical

AFTERWARDS_S = 30.0
"""Seconds after a group's last failure in which other tasks are looked at as well."""

REASON_LIMIT = 1_000
"""Characters of the newest error that the reason repeats."""

_SUSPECTS = """
WITH gone AS (
    SELECT g.task_id, g.group_id FROM groups g
    WHERE g.run_id = %(run)s AND g.state = 'abandoned' AND g.closed_cause = 'max_attempts'
        AND g.updated_at < now() - make_interval(secs => %(afterwards)s)
        AND NOT EXISTS (SELECT 1 FROM quarantine q WHERE (q.run_id, q.task_id) = (g.run_id, g.task_id)
            AND coalesce(q.released_at, 'infinity') >= g.updated_at)
), often AS (
    SELECT task_id FROM gone GROUP BY 1 HAVING count(*) >= %(after)s
), failing AS (
    SELECT o.task_id, o.group_id, min(a.started_at) AS began, max(a.finished_at) AS ended
    FROM gone o JOIN often USING (task_id)
        JOIN attempts a ON a.run_id = %(run)s AND a.group_id = o.group_id AND a.counts_as_failure
    GROUP BY 1, 2
)
SELECT f.task_id, count(*) AS groups FROM failing f, LATERAL (
    SELECT count(*) FILTER (WHERE a.status IN ('completed', 'truncated', 'agent_error')) AS scored,
        count(*) FILTER (WHERE a.counts_as_failure) AS failed
    FROM attempts a JOIN groups g USING (run_id, group_id)
    WHERE a.run_id = %(run)s AND g.task_id <> f.task_id
        AND a.finished_at BETWEEN f.began AND f.ended + make_interval(secs => %(afterwards)s)
) others
WHERE others.scored > others.failed
GROUP BY 1 HAVING count(*) >= %(after)s ORDER BY 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A task that is, or was, set aside."""

    task: str
    phase: str
    reason: str
    task_sha256: str
    at: datetime
    released_at: datetime | None
    groups: int
    """Of the task, set aside with it so far."""


def set_aside(tx: Tx, run: str, *, afterwards_s: float = AFTERWARDS_S) -> list[tuple[str, str]]:
    """Quarantine the tasks of a run that deserve it; `(task, reason)` of each new one.

    Their registered groups follow at the next hand-over; what is being sampled goes on.
    """
    found = runs.read(tx, run)
    after = found.config.groups.quarantine_after
    if after is None:
        return []
    query = {"run": run, "after": after, "afterwards": afterwards_s}
    if not tx.execute(_SUSPECTS, query).fetchall():
        return []
    runs.lock(tx, run)  # one at a time: a second leader finds the rows of the first
    return [
        (row["task_id"], _insert(tx, run, row["task_id"], row["groups"]))
        for row in tx.execute(_SUSPECTS, query).fetchall()
    ]


def release(tx: Tx, run: str, task: str) -> tuple[int, int]:
    """Draw a task again: `(groups that go back, groups whose step is past)`.

    Its failures count afresh from now on. Under `order = "dataset"` a group belongs to the step of its
    batch; one whose step is planned already stays set aside for good.

    Raises:
        RunNotFound: no such run.
        ConfigError: the task is not quarantined.
    """
    owner = runs.lock(tx, run)
    released = tx.execute(
        "UPDATE quarantine SET released_at = clock_timestamp() "
        "WHERE run_id = %s AND task_id = %s AND released_at IS NULL",
        (run, task),
    )
    if not released.rowcount:
        raise ConfigError(
            f"task {task!r} of run {run} is not quarantined; `rollbook quarantine {run}` lists those "
            "that are"
        )
    bound = owner.config.schedule.order == "dataset"
    tx.execute(
        "SELECT 1 FROM groups WHERE run_id = %s AND task_id = %s AND state = 'quarantined' "
        "ORDER BY group_id FOR NO KEY UPDATE",
        (run, task),
    )
    back = tx.execute(
        """
        UPDATE groups g SET state = 'registered', closed_cause = NULL, closed_step = NULL
        WHERE g.run_id = %(run)s AND g.task_id = %(task)s AND g.state = 'quarantined' AND NOT (
            %(bound)s AND EXISTS (SELECT 1 FROM steps s WHERE (s.run_id, s.step) = (g.run_id, g.batch)))
        """,
        {"run": run, "task": task, "bound": bound},
    ).rowcount
    past = tx.execute(
        "SELECT count(*) AS n FROM groups "
        "WHERE run_id = %s AND task_id = %s AND state = 'quarantined'",
        (run, task),
    ).fetchone()
    assert past is not None
    return back, int(past["n"])


def listed(tx: Tx, run: str) -> list[Quarantined]:
    """All of a run, newest first, those released included.

    Raises:
        RunNotFound: no such run.
    """
    runs.read(tx, run)
    rows = tx.execute(
        """
        SELECT q.task_id AS task, q.phase, q.reason, encode(q.task_sha256, 'hex') AS task_sha256, q.at,
            q.released_at, (SELECT count(*) FROM groups g WHERE g.run_id = q.run_id
                AND g.task_id = q.task_id AND g.state = 'quarantined') AS groups
        FROM quarantine q WHERE q.run_id = %s ORDER BY q.at DESC, q.task_id
        """,
        (run,),
    ).fetchall()
    return [Quarantined(**row) for row in rows]


def phase_of(error_type: str | None, error: str | None) -> str:
    """Where a rollout failed: reset, on_turn, reward, sampling, timeout, … or `rollout`."""
    if error_type in ("TIMED_OUT", "TimeoutError"):
        return "timeout"
    text = error or ""
    if text.startswith("sampling failed"):
        return "sampling"
    if text.startswith("the reward function"):
        return "reward"
    hook = re.match(r"[\w.]+\.(\w+)(?:, component .*?,)? (?:raised|returned|was cancelled)", text)
    return hook[1] if hook else "rollout"


def _insert(tx: Tx, run: str, task: str, groups: int) -> str:
    newest = tx.execute(
        """
        SELECT g.task, a.error_type, a.error FROM attempts a JOIN groups g USING (run_id, group_id)
        WHERE g.run_id = %s AND g.task_id = %s AND g.state = 'abandoned' AND a.counts_as_failure
        ORDER BY a.finished_at DESC LIMIT 1
        """,
        (run, task),
    ).fetchone()
    assert newest is not None
    why = newest["error"] or newest["error_type"] or "no error was recorded"
    reason = f"{groups} groups abandoned by its own failures; the last: {why[:REASON_LIMIT]}"
    tx.execute(
        "INSERT INTO quarantine(run_id, task_id, phase, reason, task_sha256) "
        "VALUES (%s, %s, %s, %s, %s)",
        (
            run,
            task,
            phase_of(newest["error_type"], newest["error"]),
            reason,
            sha256(canonical([task, newest["task"]])).digest(),
        ),
    )
    return reason
