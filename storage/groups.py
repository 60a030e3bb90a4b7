"""Groups as their workflow drives them: begun by one execution, closed once, tried again within bounds.

    submitted ──finish(complete)──▶ complete     its members stand in the queue
        │                                         (carry_over: part 0 first, the tails as part 1)
        └──▶ abandoned | expired | cancelled      its live attempts are cancelled

Everything here is a compare-and-set on `(gen, state = 'submitted')`: a workflow that was overtaken
(the group was closed, opened again, cancelled as surplus) is told so and changes nothing. Lock
order: groups, then attempts in key order.
"""

from typing import Any, Literal

from domain.errors import LedgerError
from domain.messages import (
    BeginGroup,
    CloseAttempt,
    FinishGroup,
    GroupVerdict,
    NextAttempt,
)
from domain.rollouts import SCORED
from storage import attempts, cancelling, queue, runs, stragglers
from storage.database import Tx, jsonb

Row = dict[str, Any]
Ended = Literal["abandoned", "expired", "cancelled"]

SIBLINGS_CAUSE: dict[str, cancelling.Cause] = {
    "complete": "surplus",
    "abandoned": "abandon",
    "expired": "abandon",
    "cancelled": "human",
}
"""Cancel cause of the attempts that still live when their group ends."""


def begin(tx: Tx, b: BeginGroup) -> bool:
    """Claim a generation of a group for one workflow execution; False if another one has it.

    The same execution, also after a reset, may claim again.
    """
    won = tx.execute(
        """UPDATE groups SET begun_at = now() WHERE (run_id, group_id, gen) = (%s, %s, %s)
            AND state = 'submitted' AND workflow_id = %s AND begun_at IS NULL RETURNING 1""",
        (b.run, b.group, b.gen, b.workflow_id),
    ).fetchone()
    claim = {"gen": b.gen, "first_execution_run_id": b.first_execution_run_id}
    if won is not None:
        tx.execute(
            """INSERT INTO events(run_id, kind, group_id, data)
            VALUES (%s, 'groups.begun', %s, %s)""",
            (b.run, b.group, jsonb(claim)),
        )
        stragglers.generation_begun(tx, b.run, b.group)
        return True
    ours = tx.execute(
        """SELECT 1 FROM groups g JOIN events e USING (run_id, group_id)
        WHERE (g.run_id, g.group_id, g.gen) = (%s, %s, %s) AND g.state = 'submitted'
            AND g.workflow_id = %s AND e.kind = 'groups.begun' AND e.data = %s""",
        (b.run, b.group, b.gen, b.workflow_id, jsonb(claim)),
    ).fetchone()
    return ours is not None


def finish(tx: Tx, f: FinishGroup) -> GroupVerdict:
    """End a generation of a group, or admit part 0 of it. Delivered again it answers alike.

    A lost race (`applied = False`) names the state the group is in now.

    Raises:
        LedgerError: no such group, or a complete group lacks members under completion `wait`.
    """
    if f.outcome == "source_broken":
        return _fail_run(tx, f)
    group = _lock(tx, f.run, f.group)
    if group["gen"] != f.gen or group["state"] != "submitted":
        again = group["gen"] == f.gen and group["state"] == f.outcome
        return GroupVerdict(state=group["state"], applied=again, members=_members(tx, f))
    rows = _lock_attempts(tx, f.run, f.group)
    if f.outcome == "complete" or group["part0"]:
        return _admit(tx, f, group, rows)
    _end(tx, f.run, group, f.outcome, f.cause or f.outcome)
    return GroupVerdict(state=f.outcome, applied=True, members=_members(tx, f))


def close_attempt(tx: Tx, c: CloseAttempt) -> NextAttempt:
    """Decide what follows an attempt that will not join its group. Delivered again it answers alike.

    In this order: it had joined after all; the group is not this generation's any more; the group
    can still be filled without it, or its straggler deadline has passed; a bound is reached
    (`max_losses` of the group, `max_stale` and `max_attempts` of the sample); the next attempt.

    Raises:
        LedgerError: no such group or attempt.
    """
    group = _lock(tx, c.run, c.group)
    rows = {(r["sample"], r["attempt"]): r for r in _lock_attempts(tx, c.run, c.group)}
    mine = rows.get((c.sample, c.attempt))
    if mine is None:
        raise LedgerError(f"group {c.group} has no attempt {c.attempt} at sample {c.sample}")
    if mine["member"]:
        return NextAttempt(adopted=attempts.ref_of(mine))
    loss = _is_loss(c, mine)
    cause = "infra_error" if loss else _cause(c, mine)
    rows[c.sample, c.attempt] = mine = _record(tx, c, mine, cause, loss=loss)
    if group["gen"] != c.gen or group["state"] != "submitted":
        return _overtaken(group)
    later = [a for s, a in rows if s == c.sample and a > c.attempt]
    if later:
        return NextAttempt(next_attempt=min(later), cause=cause)
    if cause is None or _filled(group, list(rows.values()), c.sample):
        return NextAttempt(give_up=True, cause=cause)
    tries = [rows[key] for key in sorted(rows) if key[0] == c.sample]
    if loss and _losses(tx, c) >= group["max_losses"]:
        return _give_up_group(tx, c, group, "abandoned", "max_losses")
    if cause == "stale" and _stale(tries) >= group["max_stale"]:
        return _give_up_group(tx, c, group, "expired", "max_stale")
    if _failures(tries) >= group["max_attempts"]:
        return _give_up_group(tx, c, group, "abandoned", "max_attempts")
    tx.execute(
        """UPDATE attempts SET resubmitted_as = %s
        WHERE (run_id, group_id, sample, attempt) = (%s, %s, %s, %s)""",
        (cause, c.run, c.group, c.sample, c.attempt),
    )
    tx.execute(
        """INSERT INTO attempts(run_id, group_id, sample, attempt, gen, submitted_version,
            tokens_at_quorum)
        SELECT run_id, %s, %s, %s, %s, version, %s FROM served WHERE run_id = %s""",
        (
            c.group,
            c.sample,
            c.attempt + 1,
            c.gen,
            0 if group["quorum"] else None,  # its whole output counts against the allowance
            c.run,
        ),
    )
    return NextAttempt(next_attempt=c.attempt + 1, cause=cause)


def _is_loss(c: CloseAttempt, row: Row) -> bool:
    """Whether the platform, or a person, ended it: no failure, but bounded per group.

    A status that the execution itself wrote tells more than the silence that followed it.
    """
    if row["status"] is not None:
        return bool(row["state"] == "lost")
    return row["cancel_cause"] == "human" or (c.lost and row["cancel_cause"] is None)


def _cause(c: CloseAttempt, row: Row) -> str | None:
    """The resubmission cause; None: nothing follows. The ledger's own cancel comes first."""
    asked = row["cancel_cause"] or c.cause
    if asked in attempts.CANCEL_CAUSES:
        return attempts.CANCELLED_AS.get(asked)
    return asked


def _record(tx: Tx, c: CloseAttempt, row: Row, cause: str | None, *, loss: bool) -> Row:
    """End the attempt if it has not ended, and count its failure or loss, once."""
    failure = cause not in (None, "stale") and not loss
    if (row["cancel_cause"] or c.cause) in ("resident_limit", "human"):
        failure = False
    if loss and row["status"] is None:
        tx.execute(
            "UPDATE groups SET losses = losses + 1 WHERE (run_id, group_id) = (%s, %s)",
            (c.run, c.group),
        )
    status = c.status if row["cancel_cause"] is None and c.status not in SCORED else "cancelled"
    ended = tx.execute(
        """UPDATE attempts SET counts_as_failure = counts_as_failure OR %(failure)s,
            surplus = %(over)s AND (surplus OR (status IS NULL
                AND coalesce(cancel_cause, 'surplus') = 'surplus')),
            state = CASE WHEN status IS NULL THEN %(state)s ELSE state END,
            status = coalesce(status, %(status)s::rollout_status),
            finished_at = coalesce(finished_at, clock_timestamp()),
            error_type = coalesce(error_type, %(error_type)s), error = coalesce(error, %(error)s)
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
        RETURNING *""",
        {
            "run": c.run,
            "group": c.group,
            "sample": c.sample,
            "attempt": c.attempt,
            "failure": failure,
            "over": cause is None,
            "state": "lost" if loss else "finished",
            "status": "infra_error" if loss else status,
            "error_type": c.error_type,
            "error": c.error,
        },
    ).fetchone()
    assert ended is not None
    return ended


def _filled(group: Row, rows: list[Row], sample: int) -> bool:
    """Whether the group needs this sample no more: others still reach its size, or it has closed
    its doors to new attempts."""
    others = [r for r in rows if r["sample"] != sample]
    coming = sum(1 for r in others if r["member"] or _live(r))
    return bool(group["deadline_reached"] or coming >= group["group_size"])


def _failures(tries: list[Row]) -> int:
    """Failures of a sample since its last success."""
    failures = 0
    for row in tries:
        if row["counts_as_failure"]:
            failures += 1
        elif row["status"] in SCORED:
            failures = 0
    return failures


def _stale(tries: list[Row]) -> int:
    """Stale tries of a sample, the one that is being closed included."""
    return 1 + sum(1 for row in tries if row["resubmitted_as"] == "stale")


def _losses(tx: Tx, c: CloseAttempt) -> int:
    row = tx.execute(
        "SELECT losses FROM groups WHERE (run_id, group_id) = (%s, %s)", (c.run, c.group)
    ).fetchone()
    assert row is not None
    return int(row["losses"])


def _give_up_group(tx: Tx, c: CloseAttempt, group: Row, state: Ended, why: str) -> NextAttempt:
    _end(tx, c.run, group, state, why)
    return NextAttempt(close=state, cause=why)


def _overtaken(group: Row) -> NextAttempt:
    """The answer to a workflow whose group ended, was closed or opened again meanwhile."""
    match group["state"]:
        case "complete":
            return NextAttempt(give_up=True)
        case "abandoned" | "expired" as state:
            return NextAttempt(close=state, cause=group["closed_cause"])
        case _:
            return NextAttempt(close="cancelled", cause="superseded")


def _end(tx: Tx, run: str, group: Row, state: Ended, cause: str) -> None:
    """Close the group without admitting it. What still lives is cancelled."""
    _cancel_live(tx, run, group, state)
    tx.execute(
        """UPDATE groups SET state = %s, closed_cause = %s,
            closed_step = (SELECT next_step FROM runs WHERE run_id = %s)
        WHERE (run_id, group_id) = (%s, %s)""",
        (state, cause, run, run, group["group_id"]),
    )


def _cancel_live(tx: Tx, run: str, group: Row, state: str) -> None:
    """Cancel the attempts that still live: queued ones end here, running ones are told twice, by the
    ledger at their next segment and by their workflow."""
    cause = SIBLINGS_CAUSE[state]
    running = tx.execute(
        """SELECT group_id, sample, attempt FROM attempts
        WHERE (run_id, group_id) = (%s, %s) AND state = 'running' AND cancel_cause IS NULL""",
        (run, group["group_id"]),
    ).fetchall()
    keys = [(row["group_id"], row["sample"], row["attempt"]) for row in running]
    cancelling.signal_attempts(tx, run, keys, cause)
    cancelling.stop_attempts(tx, run, [group["group_id"]], cause)


def _lock(tx: Tx, run: str, group: int) -> Row:
    row = tx.execute(
        """SELECT g.group_id, g.state, g.gen, g.share, g.workflow_id, g.closed_cause,
            g.quorum_at IS NOT NULL AS quorum, g.deadline_reached_at IS NOT NULL AS deadline_reached,
            r.group_size, r.max_attempts, r.max_stale, r.max_losses, r.completion,
            r.completion = 'deadline' AND r.on_stragglers = 'carry_over' AS carry_over,
            EXISTS (SELECT 1 FROM queue q WHERE (q.run_id, q.group_id) = (g.run_id, g.group_id)
                AND q.part = 0 AND q.state <> 'expired') AS part0
        FROM groups g JOIN runs r USING (run_id)
        WHERE g.run_id = %s AND g.group_id = %s FOR NO KEY UPDATE OF g""",
        (run, group),
    ).fetchone()
    if row is None:
        raise LedgerError(f"run {run!r} has no group {group}")
    return row


def _lock_attempts(tx: Tx, run: str, group: int) -> list[Row]:
    return tx.execute(
        """SELECT * FROM attempts WHERE (run_id, group_id) = (%s, %s)
        ORDER BY sample, attempt FOR NO KEY UPDATE""",
        (run, group),
    ).fetchall()


def _members(tx: Tx, f: FinishGroup) -> int:
    row = tx.execute(
        """SELECT count(*) AS n FROM attempts WHERE (run_id, group_id) = (%s, %s) AND member""",
        (f.run, f.group),
    ).fetchone()
    assert row is not None
    return int(row["n"])


def _live(row: Row) -> bool:
    return row["status"] is None and row["cancel_cause"] is None


def _admit(tx: Tx, f: FinishGroup, group: Row, rows: list[Row]) -> GroupVerdict:
    """Put the members that have no part yet into the queue."""
    joining = [r for r in rows if r["member"] and r["part"] is None]
    waits = f.outcome == "complete" and f.part == 0 and any(map(_live, rows))
    tails = waits and group["carry_over"] and group["deadline_reached"]
    part = 1 if group["part0"] else 0
    if tails and part == 1:  # part 0 was admitted by an earlier delivery
        return GroupVerdict(state="submitted", applied=True, members=_members(tx, f))
    if group["completion"] == "wait" and len(joining) != group["group_size"]:
        raise LedgerError(
            f"group {f.group} cannot be complete with {len(joining)} of {group['group_size']} members"
        )
    queue.admit(tx, f.run, f.group, part)
    if tails:
        return GroupVerdict(state="submitted", applied=True, members=_members(tx, f))
    if not joining and not group["part0"]:
        _end(tx, f.run, group, "abandoned", "no_members")
        return GroupVerdict(state="abandoned", applied=True)
    _cancel_live(tx, f.run, group, "complete")
    tx.execute(
        "UPDATE groups SET state = 'complete' WHERE (run_id, group_id) = (%s, %s)", (f.run, f.group)
    )
    return GroupVerdict(state="complete", applied=True, members=_members(tx, f))


def _fail_run(tx: Tx, f: FinishGroup) -> GroupVerdict:
    """The source broke its contract: stop the run, unless this generation is not current any more."""
    row = tx.execute(
        "SELECT gen, state FROM groups WHERE (run_id, group_id) = (%s, %s)", (f.run, f.group)
    ).fetchone()
    current = row is not None and (row["gen"], row["state"]) == (f.gen, "submitted")
    if current:
        runs.fail_source(tx, f.run, f.cause or "the source broke its contract")
    group = _lock(tx, f.run, f.group)
    return GroupVerdict(state=group["state"], applied=current, members=_members(tx, f))
