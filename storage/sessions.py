"""Sessions of the recording gateway: keys, what the gateway tells the attempt, and what was asked.

The rollout worker that runs an attempt issues its key; the gateway, another process, appends the
attempt's segments under the fence that the key was issued for. A key opens a session only while its
attempt runs under that fence, so an execution that was superseded is refused with everything it
started, whether or not anybody revoked its key. Only the digest of a key is stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domain.errors import Fenced
from domain.messages import AttemptIn
from domain.rollouts import Segment, Task
from storage import segments
from storage.attempts import Started
from storage.database import Tx, jsonb
from storage.segments import Place

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a key opens."""

    attempt: AttemptIn
    started: Started
    closed: str | None
    """Why nothing may be sampled any more; None while the session is open."""
    refused: str | None
    """The budget that refused the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the worker learns of its attempt, whose segments the gateway writes."""

    ours: bool
    """The attempt runs under this execution's fence."""
    cancel_cause: str | None = None
    segments: int = 0
    turns: int = 0
    tokens: int = 0
    engine: str | None = None
    refused: str | None = None
    """The budget that refused the last request; None once a later one was granted."""
    failure: str | None = None
    """Why the attempt is an infra_error, whatever the program makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The call that a segment belongs to."""

    seq: int
    call: int
    """`seq` of the call's first segment."""
    after: int | None
    """The call whose conversation this one goes on from; None: it began one."""
    asked: Mapping[str, Any] | None
    """What the first segment's request added to its conversation."""


_OWNED = """
SELECT 1 FROM attempts
WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
    AND fence = %(fence)s AND state = 'running' FOR NO KEY UPDATE"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What the ledger holds of an attempt's conversations."""

    segments: Sequence[Segment] = ()
    places: Sequence[Place] = ()
    calls: Sequence[Recorded] = ()
    """One for each segment."""


def issue(tx: Tx, i: AttemptIn, fence: int, key_sha256: bytes) -> None:
    """Give an execution its key; that of an earlier one becomes unknown.

    Raises:
        Fenced: another execution owns the attempt, or it has ended.
    """
    row = _row(i, fence=fence, key=key_sha256)
    if tx.execute(_OWNED, row).fetchone() is None:
        raise Fenced(
            f"attempt {i.attempt} at sample {i.sample} of group {i.group} does not run under "
            f"fence {fence} any more; it gets no key"
        )
    tx.execute(
        """INSERT INTO gateway_keys(run_id, group_id, sample, attempt, key_sha256, fence)
        VALUES (%(run)s, %(group)s, %(sample)s, %(attempt)s, %(key)s, %(fence)s)
        ON CONFLICT (run_id, group_id, sample, attempt) DO UPDATE SET key_sha256 = %(key)s,
            fence = %(fence)s, revoked_at = NULL, refused = NULL, failure = NULL""",
        row,
    )


def revoke(tx: Tx, i: AttemptIn, fence: int) -> None:
    """Close an execution's session for good; a later execution's key is left alone."""
    tx.execute(
        """UPDATE gateway_keys SET revoked_at = now()
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s AND revoked_at IS NULL""",
        _row(i, fence=fence),
    )


def open_session(tx: Tx, key_sha256: bytes) -> Session | None:
    """The session that a key stands for, open or not; None: no such key."""
    row = tx.execute(
        """SELECT k.run_id, k.group_id, k.sample, k.attempt, k.fence, k.refused, k.failure,
            k.revoked_at IS NOT NULL AS revoked, a.fence AS owner, a.state, a.status,
            a.cancel_cause, a.pinned_version, a.kv_version, g.task_id, g.task,
            g.deadline_reached_at IS NOT NULL AS deadline
        FROM gateway_keys k JOIN attempts a USING (run_id, group_id, sample, attempt)
            JOIN groups g USING (run_id, group_id)
        WHERE k.key_sha256 = %s""",
        (key_sha256,),
    ).fetchone()
    if row is None:
        return None
    return Session(
        attempt=AttemptIn(
            run=row["run_id"],
            group=row["group_id"],
            sample=row["sample"],
            attempt=row["attempt"],
        ),
        started=Started(
            fence=row["fence"],
            version=-1 if row["pinned_version"] is None else row["pinned_version"],
            task=Task(row["task_id"], row["task"]),
            kv_version=row["kv_version"],
            deadline=row["deadline"],
        ),
        closed=_closed(row),
        refused=row["refused"],
    )


def refuse(tx: Tx, i: AttemptIn, fence: int, cause: str | None) -> None:
    """Note which budget refused the execution's last request; None: a later one is granted."""
    tx.execute(
        """UPDATE gateway_keys SET refused = %(cause)s
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s""",
        _row(i, fence=fence, cause=cause),
    )


def fail(tx: Tx, i: AttemptIn, fence: int, detail: str) -> None:
    """Make the attempt an infra_error; the first reason stands."""
    tx.execute(
        """UPDATE gateway_keys SET failure = coalesce(failure, %(detail)s)
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s""",
        _row(i, fence=fence, detail=detail),
    )


def look(tx: Tx, i: AttemptIn, fence: int) -> Seen:
    """How the attempt stands for the execution that started it under `fence`."""
    row = tx.execute(
        """SELECT a.fence = %(fence)s AND a.state = 'running' AS ours, a.cancel_cause, a.turns,
            a.policy_tokens, a.engine_id, k.refused, k.failure,
            (SELECT count(*) FROM segments s WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                = (a.run_id, a.group_id, a.sample, a.attempt)) AS segments
        FROM attempts a LEFT JOIN gateway_keys k ON (k.run_id, k.group_id, k.sample, k.attempt)
            = (a.run_id, a.group_id, a.sample, a.attempt) AND k.fence = %(fence)s
        WHERE (a.run_id, a.group_id, a.sample, a.attempt)
            = (%(run)s, %(group)s, %(sample)s, %(attempt)s)""",
        _row(i, fence=fence),
    ).fetchone()
    if row is None:
        return Seen(ours=False)
    return Seen(
        ours=row["ours"],
        cancel_cause=row["cancel_cause"],
        segments=row["segments"],
        turns=row["turns"],
        tokens=row["policy_tokens"],
        engine=row["engine_id"],
        refused=row["refused"],
        failure=row["failure"],
    )


def note(tx: Tx, i: AttemptIn, recorded: Recorded) -> None:
    """Keep which call a segment belongs to, in the transaction that appends it; idempotent."""
    asked = None if recorded.asked is None else jsonb(recorded.asked)
    tx.execute(
        """INSERT INTO gateway_calls(run_id, group_id, sample, attempt, seq, call, after, asked)
        VALUES (%(run)s, %(group)s, %(sample)s, %(attempt)s, %(seq)s, %(call)s, %(after)s,
            %(asked)s)
        ON CONFLICT DO NOTHING""",
        _row(i, seq=recorded.seq, call=recorded.call, after=recorded.after, asked=asked),
    )


def past(tx: Tx, i: AttemptIn) -> Past:
    """All that is recorded of an attempt."""
    key = (i.run, i.group, i.sample, i.attempt)
    rows = tx.execute(
        """SELECT seq, call, after, asked FROM gateway_calls
        WHERE (run_id, group_id, sample, attempt) = (%s, %s, %s, %s) ORDER BY seq""",
        key,
    ).fetchall()
    return Past(
        segments=segments.read(tx, *key),
        places=segments.places(tx, *key),
        calls=[Recorded(**row) for row in rows],
    )


def _closed(row: Row) -> str | None:
    if row["fence"] != row["owner"]:
        return "was superseded by a newer execution of the attempt"
    if row["status"] is not None or row["state"] != "running":
        return f"has ended as {row['status']}"
    if row["cancel_cause"] is not None:
        return f"was cancelled ({row['cancel_cause']})"
    if row["failure"] is not None:
        return "has failed, and will be sampled again"
    return "is over" if row["revoked"] else None


def _row(i: AttemptIn, **more: Any) -> Row:
    return {"run": i.run, "group": i.group, "sample": i.sample, "attempt": i.attempt} | more
