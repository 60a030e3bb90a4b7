"""What the steward and the publication look at: runs, engines, versions, and work that went missing.

Reads only, over all runs of the ledger; each answer is a snapshot that its reader must not trust for
longer than one round. What follows from it is decided by compare-and-set elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from domain.ids import group_workflow_id, policy_name
from storage.database import Tx

_ACTIVE = ("creating", "running", "paused", "closing")


Need = Literal["load", "publishing", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A submitted group of which nothing was heard for a while."""

    run: str
    group: int
    gen: int
    workflow_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A running attempt of which nothing was heard for a while."""

    run: str
    group: int
    sample: int
    attempt: int
    fence: int
    workflow_id: str
    """Of the generation that made it."""


def runs_to_tend(tx: Tx, held: Sequence[str] = ()) -> list[str]:
    """Active runs, and those of the `held` that exist: a finished run is still evaluated."""
    rows = tx.execute(
        "SELECT run_id FROM runs WHERE state = ANY(%s) OR run_id = ANY(%s) ORDER BY run_id",
        (list(_ACTIVE), list(held)),
    ).fetchall()
    return [row["run_id"] for row in rows]


def known_runs(tx: Tx, names: Sequence[str]) -> frozenset[str]:
    """Those of the names that are runs of this ledger."""
    rows = tx.execute("SELECT run_id FROM runs WHERE run_id = ANY(%s)", (list(names),)).fetchall()
    return frozenset(row["run_id"] for row in rows)


def live_engines(tx: Tx, run: str) -> list[tuple[str, int]]:
    """`(base URL, incarnation)` of the engines whose health was seen lately."""
    rows = tx.execute(
        "SELECT engine_id, incarnation FROM engines WHERE run_id = %s AND alive_until > now() "
        "ORDER BY engine_id",
        (run,),
    ).fetchall()
    return [(row["engine_id"], row["incarnation"]) for row in rows]


def wanted(tx: Tx) -> Mapping[str, Need]:
    """What engines must or may hold, by policy name; the rest was drained of pins and can go.

    `load`: the newest served version of an active run, and pinned ones. `publishing`: a publication
    is loading it. `keep`: served still, such as the last version of a run that has ended.
    """
    rows = tx.execute(
        """
        SELECT n.run_id, n.version, CASE WHEN n.state = 'loading' THEN 'publishing'
            WHEN r.state = ANY(%s) AND (n.pins > 0 OR n.version = s.version) THEN 'load'
            ELSE 'keep' END AS need
        FROM version_pins n JOIN runs r USING (run_id) LEFT JOIN served s USING (run_id)
        WHERE n.state IN ('loading', 'served') OR (n.state = 'draining' AND n.pins > 0)
        ORDER BY n.run_id, n.version
        """,
        (list(_ACTIVE),),
    ).fetchall()
    return {policy_name(row["run_id"], row["version"]): row["need"] for row in rows}


def pinned(tx: Tx) -> frozenset[str]:
    """Names of the policies that running attempts pin."""
    rows = tx.execute("SELECT run_id, version FROM version_pins WHERE pins > 0").fetchall()
    return frozenset(policy_name(row["run_id"], row["version"]) for row in rows)


def acknowledged(tx: Tx, engine: str, incarnation: int) -> frozenset[str]:
    """Names of the policies that this engine process acknowledged."""
    rows = tx.execute(
        "SELECT run_id, version FROM engine_versions WHERE (engine_id, incarnation) = (%s, %s)",
        (engine, incarnation),
    ).fetchall()
    return frozenset(policy_name(row["run_id"], row["version"]) for row in rows)


def quiet_groups(tx: Tx, *, grace_s: float, limit: int) -> list[Open]:
    """Groups whose workflow was told to start long ago and of which nothing was heard since.

    A group whose start is still in the outbox is late, not lost, unless that was set aside. One whose
    attempts progress is alive.
    """
    rows = tx.execute(
        """
        SELECT g.run_id AS run, g.group_id AS group, g.gen, g.workflow_id FROM groups g
        WHERE g.state = 'submitted' AND g.submitted_at < now() - make_interval(secs => %(grace)s)
            AND (g.begun_at IS NOT NULL OR NOT EXISTS (SELECT 1 FROM outbox o
                WHERE (o.run_id, o.kind, o.key) = (g.run_id, 'start_group', g.workflow_id)
                    AND o.set_aside_at IS NULL
                    AND (o.done_at IS NULL OR o.done_at > now() - make_interval(secs => %(grace)s))))
            AND NOT EXISTS (SELECT 1 FROM attempts a
                WHERE (a.run_id, a.group_id) = (g.run_id, g.group_id)
                    AND greatest(a.last_progress_at, a.finished_at)
                        > now() - make_interval(secs => %(grace)s))
        ORDER BY g.submitted_at LIMIT %(limit)s
        """,
        {"grace": grace_s, "limit": limit},
    ).fetchall()
    return [Open(**row) for row in rows]


def current_workflows(tx: Tx, workflow_ids: Sequence[str]) -> frozenset[str]:
    """Those of the workflows that a submitted group names as its own."""
    rows = tx.execute(
        "SELECT workflow_id FROM groups WHERE state = 'submitted' AND workflow_id = ANY(%s)",
        (list(workflow_ids),),
    ).fetchall()
    return frozenset(row["workflow_id"] for row in rows)


def silent_attempts(tx: Tx, *, silent_s: float, cancelled: bool, limit: int) -> list[Silent]:
    """Running attempts silent for so long, with (`cancelled`) or without a cancel request."""
    rows = tx.execute(
        """
        SELECT a.run_id AS run, a.group_id AS group, a.sample, a.attempt, a.fence, a.gen, g.batch
        FROM attempts a JOIN groups g USING (run_id, group_id)
        WHERE a.state = 'running' AND (a.cancel_cause IS NOT NULL) = %s
            AND greatest(a.last_progress_at, a.cancel_requested_at)
                < now() - make_interval(secs => %s)
        ORDER BY a.last_progress_at LIMIT %s
        """,
        (cancelled, silent_s, limit),
    ).fetchall()
    return [_silent(row) for row in rows]


def workers(tx: Tx) -> list[str]:
    """Names of the processes that run attempts (`domain.holders`)."""
    rows = tx.execute(
        "SELECT DISTINCT worker FROM attempts WHERE state = 'running' AND worker IS NOT NULL "
        "ORDER BY worker"
    ).fetchall()
    return [row["worker"] for row in rows]


def attempts_of(tx: Tx, workers: Sequence[str]) -> list[Silent]:
    """Running attempts of these workers, told to stop or not."""
    rows = tx.execute(
        """
        SELECT a.run_id AS run, a.group_id AS group, a.sample, a.attempt, a.fence, a.gen, g.batch
        FROM attempts a JOIN groups g USING (run_id, group_id)
        WHERE a.state = 'running' AND a.worker = ANY(%s)
        ORDER BY a.run_id, a.group_id, a.sample, a.attempt
        """,
        (list(workers),),
    ).fetchall()
    return [_silent(row) for row in rows]


def stuck_publications(tx: Tx, *, grace_s: float) -> list[tuple[str, int]]:
    """`(run, version)` that load although their publication was delivered a while ago."""
    rows = tx.execute(
        """
        SELECT p.run_id, p.version FROM policy_versions p JOIN runs r USING (run_id)
        LEFT JOIN served s ON s.run_id = p.run_id
        WHERE p.state = 'loading' AND p.version > coalesce(s.version, -1) AND r.state = ANY(%s)
            AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.run_id = p.run_id AND o.kind = 'publish'
                AND (o.payload->>'version')::int = p.version AND o.set_aside_at IS NULL
                AND (o.done_at IS NULL OR o.done_at > now() - make_interval(secs => %s)))
        ORDER BY 1, 2
        """,
        (list(_ACTIVE), grace_s),
    ).fetchall()
    return [(row["run_id"], row["version"]) for row in rows]


def violations(tx: Tx) -> list[tuple[str, str]]:
    """`(run, what)` for each broken rule of a run that has not failed yet; always empty."""
    rows = tx.execute(
        """
        SELECT v.run_id, string_agg(v.rule || ': ' || v.what, '; ' ORDER BY v.rule, v.what) AS what
        FROM ledger_violations v JOIN runs r USING (run_id) WHERE r.state <> 'failed'
        GROUP BY v.run_id ORDER BY v.run_id
        """
    ).fetchall()
    return [(row["run_id"], row["what"]) for row in rows]


def _silent(row: Mapping[str, Any]) -> Silent:
    return Silent(
        run=row["run"],
        group=row["group"],
        sample=row["sample"],
        attempt=row["attempt"],
        fence=row["fence"],
        workflow_id=group_workflow_id(row["run"], row["batch"], row["group"], row["gen"]),
    )
