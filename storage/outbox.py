"""Commands on their way from the ledger to Temporal, written in the transaction that decides them.

The steward delivers them at least once, those of one workflow in order: every command is a no-op when
it comes twice. While Temporal is away they wait. One that is refused by itself, whatever the reason,
waits longer each time and is set aside after `REFUSALS`; its error stays in its row, and what it was
for is done another way: the sweep opens a group that was never started again, with a command that
today's code writes, and starts a publication by itself; a signal only hastens what rollouts see in the
ledger anyhow.

    kind           key                       payload
    start_group    workflow id               GroupIn
    cancel_sample  workflow id/s{s}.a{a}     workflow_id, sample, attempt, cause
    deadline       workflow id               workflow_id
    close_group    workflow id               workflow_id, cause
    publish        workflow id               run, version

Each carries the `traceparent` of the span that decided it, where traces are on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from domain import tracing
from storage.database import Tx, jsonb

REFUSALS = 8
"""Refusals of one command after which it is set aside, a minute and a half after the first."""

AWAY_S = 1.0
"""Seconds before a command is tried again that Temporal was not there to take."""

Kind = Literal["start_group", "cancel_sample", "deadline", "close_group", "publish"]


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the outbox."""

    id: int
    run: str
    kind: Kind
    key: str
    payload: Mapping[str, Any]


def add(tx: Tx, run: str, kind: Kind, commands: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Insert `(key, payload)` commands; one that exists already stays as it is."""
    rows = [(run, kind, key, jsonb({**payload, **tracing.carrier()})) for key, payload in commands]
    if rows:
        with tx.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO outbox(run_id, kind, key, payload) VALUES (%s, %s, %s, %s) "
                "ON CONFLICT (run_id, kind, key) DO NOTHING",
                rows,
            )


def repeat(tx: Tx, run: str, kind: Kind, key: str, payload: Mapping[str, Any]) -> None:
    """Insert a command, or send the one of this key again."""
    tx.execute(
        "INSERT INTO outbox(run_id, kind, key, payload) VALUES (%s, %s, %s, %s) "
        "ON CONFLICT (run_id, kind, key) DO UPDATE SET done_at = NULL, payload = excluded.payload, "
        "due_at = now(), refusals = 0, set_aside_at = NULL",
        (run, kind, key, jsonb({**payload, **tracing.carrier()})),
    )


def traceparents(tx: Tx, run: str, groups: Sequence[int]) -> list[str]:
    """Of the spans that submitted these groups, where they were traced and not purged since."""
    rows = tx.execute(
        """
        SELECT DISTINCT o.payload->>'traceparent' AS traceparent
        FROM groups g JOIN outbox o
            ON (o.run_id, o.kind, o.key) = (g.run_id, 'start_group', g.workflow_id)
        WHERE g.run_id = %s AND g.group_id = ANY(%s) AND o.payload ? 'traceparent'
        """,
        (run, list(groups)),
    ).fetchall()
    return [row["traceparent"] for row in rows]


def claim(tx: Tx, limit: int = 100) -> list[Command]:
    """The commands that have been due longest, oldest first; skips rows another relay is claiming.

    One command of each workflow at a time, so that theirs arrive in order. Nothing is leased: the
    caller delivers after its commit, and a second relay that delivers the same command does no harm.
    A `start_group` whose generation is over is marked done instead, and so is a `publish` of a
    version that is served or superseded, and a signal that was set aside once its group is closed.
    """
    tx.execute(
        """
        UPDATE outbox SET done_at = now(), last_error = concat_ws('; before: ', 'superseded', last_error)
        WHERE id IN (
            SELECT o.id FROM outbox o WHERE o.done_at IS NULL
                AND CASE o.kind
                    WHEN 'start_group' THEN NOT EXISTS (SELECT 1 FROM groups g
                        WHERE g.workflow_id = o.key AND g.state = 'submitted')
                    WHEN 'publish' THEN EXISTS (SELECT 1 FROM policy_versions p
                        WHERE p.run_id = o.run_id AND p.state <> 'loading'
                            AND p.version = (o.payload->>'version')::int)
                    ELSE o.set_aside_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM groups g
                        WHERE g.workflow_id = o.payload->>'workflow_id' AND g.state = 'submitted') END
            FOR NO KEY UPDATE SKIP LOCKED)
        """
    )
    rows = tx.execute(
        """
        UPDATE outbox SET tries = tries + 1 WHERE id IN (
            SELECT o.id FROM outbox o
            WHERE o.done_at IS NULL AND o.set_aside_at IS NULL AND o.due_at <= now()
                AND NOT EXISTS (SELECT 1 FROM outbox e WHERE e.run_id = o.run_id AND e.id < o.id
                    AND e.done_at IS NULL AND e.set_aside_at IS NULL
                    AND coalesce(e.payload->>'workflow_id', e.key)
                        = coalesce(o.payload->>'workflow_id', o.key))
            ORDER BY o.due_at, o.id LIMIT %s FOR NO KEY UPDATE OF o SKIP LOCKED)
        RETURNING id, run_id AS run, kind, key, payload
        """,
        (limit,),
    ).fetchall()
    return [Command(**row) for row in sorted(rows, key=lambda row: row["id"])]


def done(tx: Tx, ids: Sequence[int]) -> None:
    """Mark delivered commands."""
    tx.execute(
        "UPDATE outbox SET done_at = now(), last_error = NULL WHERE id = ANY(%s)", (list(ids),)
    )


def failed(tx: Tx, errors: Mapping[int, str]) -> None:
    """Note why these commands were not taken, by id, through no fault of theirs: due again soon.

    What was never tried goes first then, so that no number of them can hold up the rest.
    """
    tx.execute(
        """
        UPDATE outbox o SET last_error = x.error, due_at = now() + make_interval(secs => %s)
        FROM unnest(%s::bigint[], %s::text[]) AS x(id, error) WHERE o.id = x.id AND o.done_at IS NULL
        """,
        (AWAY_S, list(errors), list(errors.values())),
    )


def refused(tx: Tx, command: int, error: str) -> bool:
    """Note that a command was refused by itself; whether it is set aside now."""
    row = tx.execute(
        """
        UPDATE outbox SET last_error = %(error)s, refusals = refusals + 1,
            due_at = now() + make_interval(secs => least(0.5 * 2 ^ refusals, 30)),
            set_aside_at = CASE WHEN refusals + 1 >= %(most)s THEN now() END
        WHERE id = %(id)s AND done_at IS NULL AND set_aside_at IS NULL
        RETURNING set_aside_at IS NOT NULL AS aside
        """,
        {"error": error, "most": REFUSALS, "id": command},
    ).fetchone()
    return row is not None and bool(row["aside"])


def purge(tx: Tx, *, older_s: float) -> int:
    """Delete commands done that many seconds ago; a `start_group` only once its workflow began."""
    return tx.execute(
        """
        DELETE FROM outbox o WHERE o.done_at < now() - make_interval(secs => %s)
            AND NOT (o.kind = 'start_group' AND EXISTS (
                SELECT 1 FROM groups g WHERE g.workflow_id = o.key AND g.begun_at IS NULL))
        """,
        (older_s,),
    ).rowcount
