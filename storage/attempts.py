"""Attempts: the transactions in which one try at a sample starts and ends.

    submitted ──start──▶ running ──finish──▶ finished          (lost: the platform died under it)

Every execution of an attempt takes a new *fence* when it starts; whatever an older execution still
sends is refused with `Fenced`, its start included: a server that was frozen may answer one that was
given up long ago. An attempt ends once: what arrives later is counted as `late_result`
and changes nothing. Lock order: groups, then attempts in key order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any

from domain.errors import Fenced, LedgerError
from domain.groups import trains, truncation_policy, verdict
from domain.messages import AttemptIn, AttemptRef
from domain.rollouts import SCORED, Status, Task
from storage import stragglers
from storage.database import Tx, jsonb

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What an execution needs to know. If `ended` is set there is nothing left to run."""

    fence: int
    version: int
    """Pinned: the version served when the attempt first started."""
    task: Task
    segments: int = 0
    """Committed by earlier executions of this attempt."""
    kv_version: int | None = None
    deadline: bool = False
    """The group's straggler deadline has passed."""
    ended: AttemptRef | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an execution says that its attempt ended."""

    status: Status
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's own measurements, summed into the step record."""
    cause: str | None = None
    """Truncation cause."""
    timed_out: bool = False
    """Cancelled because its time was up."""
    error_type: str | None = None
    error: str | None = None


CANCELLED_AS = {
    "stale": "stale",
    "timeout": "timeout",
    "resident_limit": "cancelled",
    "human": "cancelled",
}
"""Cancel causes after which the sample is tried again, and the resubmission cause that is counted.
The others (surplus, close, reopen, abandon, deadline) end the sample."""

CANCEL_CAUSES = frozenset(CANCELLED_AS) | {"surplus", "close", "reopen", "abandon", "deadline"}
"""Why the ledger cancels an attempt (`attempts.cancel_cause`)."""

LOOKS = 8
"""Looks at what is served: a publish may replace it between the look and the lock."""

# One statement, for there is one for every rollout. The lock on the version that is served blocks
# `versions.retire`, which locks FOR UPDATE and then counts the pins again.
_START = """
WITH pin AS (SELECT version FROM policy_versions WHERE run_id = %(run)s AND state = 'served'
        AND version = (SELECT version FROM served WHERE run_id = %(run)s) FOR KEY SHARE),
    started AS (UPDATE attempts SET fence = fence + 1, state = 'running', worker = %(worker)s,
        scheduled_at = coalesce(%(scheduled_at)s, scheduled_at),
        pinned_version = coalesce(pinned_version, pin.version),
        started_at = coalesce(started_at, now()), last_progress_at = now()
    FROM pin WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
        AND status IS NULL AND cancel_cause IS NULL
        AND (scheduled_at > %(scheduled_at)s) IS NOT TRUE
    RETURNING fence, pinned_version, kv_version)
SELECT g.task_id, g.task, g.deadline_reached_at IS NOT NULL AS deadline, pin.version AS served,
    started.fence, started.pinned_version, started.kv_version
FROM groups g LEFT JOIN pin ON true LEFT JOIN started ON true
WHERE (g.run_id, g.group_id) = (%(run)s, %(group)s)"""

_END_CANCELLED = """
UPDATE attempts SET fence = fence + 1, state = 'finished', status = 'cancelled',
    surplus = (cancel_cause = 'surplus'), finished_at = clock_timestamp()
WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
    AND status IS NULL AND cancel_cause IS NOT NULL
    AND (scheduled_at > %(scheduled_at)s) IS NOT TRUE"""


def start(tx: Tx, i: AttemptIn, *, worker: str, scheduled_at: datetime | None = None) -> Started:
    """Take the attempt for this execution and pin the version served now (a resumed one keeps its pin).

    An attempt that was cancelled before this execution began ends here.

    Args:
        tx: the transaction.
        i: the attempt.
        worker: of the execution, for people.
        scheduled_at: when Temporal scheduled this execution, which orders them (their numbers begin
            anew when a person resets one); None: it is the newest.

    Raises:
        LedgerError: no such attempt, or nothing is served yet.
        Fenced: a later execution has started.
    """
    key = key_of(i) | {"scheduled_at": scheduled_at}
    for _ in range(LOOKS):
        found = tx.execute(_START, key | {"worker": worker}).fetchone()
        if found is None:
            raise LedgerError(f"run {i.run!r} has no group {i.group}")
        if found["served"] is not None:
            break
    else:
        raise nothing_served(i.run)
    known = Task(found["task_id"], found["task"])
    if found["fence"] is None:
        tx.execute(_END_CANCELLED, key)
        row = _read(tx, i)
        if row is None:
            raise LedgerError(f"group {i.group} has no attempt {i.attempt} at sample {i.sample}")
        if row["status"] is None:
            raise Fenced(f"{_name(i)} belongs to a later execution than this one")
        return Started(
            fence=row["fence"],
            version=-1 if row["pinned_version"] is None else row["pinned_version"],
            task=known,
            ended=ref_of(row),
            error=row["error"] or "",
        )
    return Started(
        fence=found["fence"],
        version=found["pinned_version"],
        task=known,
        segments=_committed(tx, i) if found["fence"] > 1 else 0,
        kv_version=found["kv_version"],
        deadline=found["deadline"],
    )


def finish(tx: Tx, i: AttemptIn, fence: int, end: Ending) -> AttemptRef:
    """End the attempt, and let it join its group if it may and the group is not full.

    Delivered again it answers with what stands. A scored rollout that finds its group full, closed
    or opened again is surplus.

    Raises:
        Fenced: another execution owns the attempt, or it ended otherwise: a late result.
        ValueError: the reward is not a finite number, or a scored status came without one.
    """
    if end.reward is not None and not isfinite(end.reward):
        raise ValueError(
            f"reward {end.reward} of sample {i.sample} in group {i.group} is no verdict"
        )
    group = _lock_group(tx, i)
    deadline = stragglers.Deadline.of(group)
    row = _lock_attempts(tx, i, everyone=deadline is not None and not deadline.quorum)
    if row is None:
        raise LedgerError(f"group {i.group} has no attempt {i.attempt} at sample {i.sample}")
    if row["fence"] != fence:
        raise Fenced(not_ours(i, fence))
    if row["status"] is not None:
        if (row["status"], row["reward"], row["truncation"]) == (end.status, end.reward, end.cause):
            return ref_of(row)
        raise Fenced(f"{_name(i)} has ended as {row['status']} already, not as {end.status}")
    policy = truncation_policy(group["truncation"], group["truncation_by_cause"], end.cause)
    outcome = verdict(end.status, end.reward, policy)
    # After the straggler deadline nothing is tried again: an unscored tail joins without a verdict.
    joins = outcome.joins or (outcome.resubmit == "unscored" and group["deadline_reached"])
    cancel_cause = row["cancel_cause"] or ("timeout" if end.timed_out else None)
    again = cancel_cause is not None and cancel_cause != "deadline"
    open_ = group["state"] == "submitted" and not again
    member = joins and open_ and (row["members"] < group["group_size"] or _give_way(tx, i, end))
    tried_again = cancel_cause in CANCELLED_AS
    surplus = not member and (
        joins and not tried_again
        if end.status in SCORED
        else end.status is Status.CANCELLED and cancel_cause in (None, "surplus")
    )
    ended = tx.execute(
        """UPDATE attempts SET state = 'finished', status = %(status)s, reward = %(reward)s,
            reward_parts = %(parts)s, metrics = %(metrics)s, truncation = %(truncation)s,
            -- each chain up to its last sampled id; none of a member that takes no rows
            chain_lengths = CASE WHEN %(trains)s THEN ARRAY(
                SELECT max(context_start + prompt_tokens + tokens) FROM segments s
                WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                    = (%(run)s, %(group)s, %(sample)s, %(attempt)s) AND s.tokens > 0
                GROUP BY chain ORDER BY chain) WHEN %(scored)s THEN '{}' END,
            member = %(member)s, surplus = %(surplus)s, error_type = %(error_type)s,
            cancel_cause = %(cancel_cause)s, error = %(error)s, finished_at = clock_timestamp()
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
        RETURNING sample, attempt, status, member, surplus, cancel_cause, truncation, reward,
            policy_tokens, turns, pinned_version, oldest_version""",
        key_of(i)
        | {
            "status": end.status.value,
            "reward": end.reward,
            "parts": jsonb(dict(end.components)) if end.components else None,
            "metrics": jsonb(dict(end.metrics)) if end.metrics else None,
            "truncation": end.cause,
            "scored": end.status in SCORED,
            "trains": end.status in SCORED and trains(end.status, policy),
            "member": member,
            "surplus": surplus,
            "cancel_cause": cancel_cause,
            "error_type": end.error_type,
            "error": end.error,
        },
    ).fetchone()
    assert ended is not None
    if member and deadline is not None:
        stragglers.count_members(tx, i.run, i.group, deadline)
    return ref_of(ended)


def read(tx: Tx, i: AttemptIn) -> AttemptRef | None:
    """How the attempt ended; None while it has not.

    Raises:
        LedgerError: no such attempt.
    """
    row = _read(tx, i)
    if row is None:
        raise LedgerError(f"group {i.group} has no attempt {i.attempt} at sample {i.sample}")
    return None if row["status"] is None else ref_of(row)


def late_result(tx: Tx, i: AttemptIn, fence: int, what: str) -> None:
    """Count something that an execution sent after its attempt had ended or passed to another."""
    tx.execute(
        """INSERT INTO events(run_id, kind, group_id, sample, attempt, data)
        VALUES (%(run)s, 'late_result', %(group)s, %(sample)s, %(attempt)s, %(data)s)""",
        key_of(i) | {"data": jsonb({"fence": fence, "what": what})},
    )


def ref_of(row: Row) -> AttemptRef:
    """The reference of an attempt that has ended."""
    resubmit = None
    if not row["member"] and not row["surplus"]:
        resubmit = {
            Status.TRUNCATED: "unscored",
            Status.INFRA_ERROR: "infra_error",
            Status.CANCELLED: "cancelled",
        }.get(row["status"])
        if row["cancel_cause"] is not None:
            resubmit = CANCELLED_AS.get(row["cancel_cause"])
    return AttemptRef(
        sample=row["sample"],
        attempt=row["attempt"],
        status=row["status"],
        member=row["member"],
        surplus=row["surplus"],
        resubmit=resubmit,
        cause=row["truncation"],
        reward=row["reward"],
        tokens=row["policy_tokens"],
        turns=row["turns"],
        version=row["pinned_version"] if row["oldest_version"] is None else row["oldest_version"],
    )


def _give_way(tx: Tx, i: AttemptIn, end: Ending) -> bool:
    """Whether a member of the full group leaves its place to this finisher.

    Members are taken in the order in which they finish. Tails that were cut at the deadline end
    together: among those the lower sample index joins, so one of a higher index gives way.
    """
    if end.cause != "group_deadline":
        return False
    other = tx.execute(
        """SELECT sample, attempt FROM attempts WHERE run_id = %(run)s AND group_id = %(group)s
            AND member AND truncation = 'group_deadline' AND part IS NULL
        ORDER BY sample DESC LIMIT 1""",
        key_of(i),
    ).fetchone()
    if other is None or other["sample"] < i.sample:
        return False
    tx.execute(
        """UPDATE attempts SET member = false, surplus = true WHERE
        (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(s)s, %(a)s)""",
        key_of(i) | {"s": other["sample"], "a": other["attempt"]},
    )
    return True


def _committed(tx: Tx, i: AttemptIn) -> int:
    """Segments of earlier executions."""
    row = tx.execute(
        """SELECT count(*) AS n FROM segments
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)""",
        key_of(i),
    ).fetchone()
    assert row is not None
    return int(row["n"])


def _lock_group(tx: Tx, i: AttemptIn) -> Row:
    row = tx.execute(
        """SELECT g.state, g.workflow_id, g.quorum_at IS NOT NULL AS quorum,
            g.deadline_reached_at IS NOT NULL AS deadline_reached, r.group_size, r.truncation,
            r.truncation_by_cause, r.completion, r.min_members, r.max_straggler_tokens,
            r.on_stragglers
        FROM groups g JOIN runs r USING (run_id)
        WHERE g.run_id = %(run)s AND g.group_id = %(group)s FOR NO KEY UPDATE OF g""",
        key_of(i),
    ).fetchone()
    if row is None:
        raise LedgerError(f"run {i.run!r} has no group {i.group}")
    return row


def _lock_attempts(tx: Tx, i: AttemptIn, *, everyone: bool) -> Row | None:
    """Lock this attempt, and with `everyone` all that have not ended, in key order.

    The answer counts the group's `members`, which change only under the group's lock.
    """
    rows = tx.execute(
        """SELECT sample, attempt, fence, status, member, surplus, cancel_cause, truncation, reward,
            policy_tokens, turns, pinned_version, oldest_version, (SELECT count(*) FROM attempts m
            WHERE m.run_id = %(run)s AND m.group_id = %(group)s AND m.member) AS members
        FROM attempts WHERE run_id = %(run)s AND group_id = %(group)s
            AND ((sample, attempt) = (%(sample)s, %(attempt)s) OR (%(everyone)s AND status IS NULL))
        ORDER BY sample, attempt FOR NO KEY UPDATE""",
        key_of(i) | {"everyone": everyone},
    ).fetchall()
    return next((r for r in rows if (r["sample"], r["attempt"]) == (i.sample, i.attempt)), None)


def nothing_served(run: str) -> LedgerError:
    """What a run without weights to sample from is told."""
    return LedgerError(f"run {run!r} serves no version yet; nothing can be sampled")


def _read(tx: Tx, i: AttemptIn) -> Row | None:
    return tx.execute(
        """SELECT sample, attempt, fence, status, member, surplus, cancel_cause, truncation, reward,
            policy_tokens, turns, pinned_version, oldest_version, error FROM attempts
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)""",
        key_of(i),
    ).fetchone()


def key_of(i: AttemptIn) -> Row:
    """Parameters that name an attempt in a statement."""
    return {"run": i.run, "group": i.group, "sample": i.sample, "attempt": i.attempt}


def _name(i: AttemptIn) -> str:
    return f"attempt {i.attempt} at sample {i.sample} of group {i.group}"


def not_ours(i: AttemptIn, fence: int) -> str:
    """What a fenced execution is told."""
    return f"{_name(i)} belongs to a newer execution than fence {fence}; this one must stop writing"
