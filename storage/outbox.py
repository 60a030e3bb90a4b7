"""Commands on their way from the ledger to Temporal, written in the transaction that decides them.

The steward delivers them in order, at least once: every command is a no-op when it comes twice.

    kind           key                       payload
    start_group    workflow id               GroupIn
    cancel_sample  workflow id/s{s}.a{a}     workflow_id, sample, attempt, cause
    deadline       workflow id               workflow_id
    close_group    workflow id               workflow_id, cause
    publish        workflow id               run, version
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storage.database import Tx, jsonb

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
    rows = [(run, kind, key, jsonb(payload)) for key, payload in commands]
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
        "ON CONFLICT (run_id, kind, key) DO UPDATE SET done_at = NULL, payload = excluded.payload",
        (run, kind, key, jsonb(payload)),
    )


def claim(tx: Tx, limit: int = 100) -> list[Command]:
    """The oldest commands that are not done, oldest first; skips rows another relay is claiming.

    Nothing is leased: the caller delivers after its commit, and a second relay that delivers the
    same command does no harm. A `start_group` whose generation is over is marked done instead, and
    so is a `publish` of a version that is served or superseded.
    """
    tx.execute(
        """
        UPDATE outbox SET done_at = now(), last_error = 'superseded' WHERE id IN (
            SELECT o.id FROM outbox o WHERE o.done_at IS NULL
                AND CASE o.kind
                    WHEN 'start_group' THEN NOT EXISTS (SELECT 1 FROM groups g
                        WHERE g.workflow_id = o.key AND g.state = 'submitted')
                    WHEN 'publish' THEN EXISTS (SELECT 1 FROM policy_versions p
                        WHERE p.run_id = o.run_id AND p.state <> 'loading'
                            AND p.version = (o.payload->>'version')::int)
                    ELSE false END
            FOR NO KEY UPDATE SKIP LOCKED)
        """
    )
    rows = tx.execute(
        """
        UPDATE outbox SET tries = tries + 1 WHERE id IN (
            SELECT id FROM outbox WHERE done_at IS NULL ORDER BY id
            LIMIT %s FOR NO KEY UPDATE SKIP LOCKED)
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


def failed(tx: Tx, command: int, error: str) -> None:
    """Note why a delivery failed; the command stays due."""
    tx.execute("UPDATE outbox SET last_error = %s WHERE id = %s", (error, command))


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
