"""The straggler deadline of a group, kept entirely in the ledger (`completion.mode = "deadline"`).

    min_members finished ──▶ quorum: every unfinished member gets an allowance of tokens
    one of them used it up ──▶ deadline: all of them see it at their next segment boundary

It is no wall clock: a member in a tool call uses nothing up. Callers hold the group's row lock.
"""

from dataclasses import dataclass
from typing import Any, Literal

from storage import outbox
from storage.database import Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Where a group stands."""

    workflow_id: str
    quorum: bool
    reached: bool
    min_members: int
    allowance: int
    """Tokens that each unfinished member may sample after the quorum."""
    on_stragglers: Literal["truncate", "discard", "carry_over"]

    @classmethod
    def of(cls, group: dict[str, Any]) -> "Deadline | None":
        """The deadline of a group that is still sampled; None if its run knows no deadline."""
        if group["completion"] != "deadline" or group["state"] != "submitted":
            return None
        return cls(
            workflow_id=group["workflow_id"],
            quorum=group["quorum"],
            reached=group["deadline_reached"],
            min_members=group["min_members"],
            allowance=group["max_straggler_tokens"],
            on_stragglers=group["on_stragglers"],
        )


def lock(tx: Tx, run: str, group: int) -> Deadline | None:
    """Lock the group if its run has straggler deadlines, before any attempt is locked."""
    row = tx.execute(
        """SELECT g.state, g.workflow_id, g.quorum_at IS NOT NULL AS quorum,
            g.deadline_reached_at IS NOT NULL AS deadline_reached, r.completion, r.min_members,
            r.max_straggler_tokens, r.on_stragglers
        FROM groups g JOIN runs r USING (run_id)
        WHERE (g.run_id, g.group_id) = (%s, %s) AND r.completion = 'deadline'
        FOR NO KEY UPDATE OF g""",
        (run, group),
    ).fetchone()
    return None if row is None else Deadline.of(row)


def lock_unfinished(tx: Tx, run: str, group: int) -> None:
    """Lock every attempt of the group that has not ended, in key order."""
    tx.execute(
        """SELECT 1 FROM attempts WHERE (run_id, group_id) = (%s, %s) AND status IS NULL
        ORDER BY sample, attempt FOR NO KEY UPDATE""",
        (run, group),
    )


def generation_begun(tx: Tx, run: str, group: int) -> None:
    """Start the allowance of a group that was opened again, if the members it kept are a quorum."""
    deadline = lock(tx, run, group)
    if deadline is not None:
        lock_unfinished(tx, run, group)
        count_members(tx, run, group, deadline)


def count_members(tx: Tx, run: str, group: int, deadline: Deadline) -> None:
    """Start the allowance when the quorum is complete. The unfinished attempts are locked."""
    if deadline.quorum:
        return
    row = tx.execute(
        """UPDATE groups SET quorum_at = clock_timestamp()
        WHERE (run_id, group_id) = (%(run)s, %(group)s) AND %(quorum)s <= (SELECT count(*)
            FROM attempts WHERE (run_id, group_id) = (%(run)s, %(group)s) AND member)
        RETURNING 1""",
        {"run": run, "group": group, "quorum": deadline.min_members},
    ).fetchone()
    if row is None:
        return
    stragglers = tx.execute(
        """UPDATE attempts SET tokens_at_quorum = policy_tokens
        WHERE (run_id, group_id) = (%s, %s) AND status IS NULL""",
        (run, group),
    ).rowcount
    if stragglers and deadline.allowance == 0:
        reach(tx, run, group, deadline)


def reach(tx: Tx, run: str, group: int, deadline: Deadline) -> None:
    """Pass the deadline. Under `discard` the unfinished members are cancelled (they are locked)."""
    tx.execute(
        """UPDATE groups SET deadline_reached_at = clock_timestamp()
        WHERE (run_id, group_id) = (%s, %s) AND deadline_reached_at IS NULL""",
        (run, group),
    )
    outbox.add(tx, run, "deadline", [(deadline.workflow_id, {"workflow_id": deadline.workflow_id})])
    if deadline.on_stragglers == "discard":
        tx.execute(
            """UPDATE attempts SET cancel_cause = 'deadline', cancel_requested_at = now(),
                state = CASE state WHEN 'submitted' THEN 'finished' ELSE state END,
                status = CASE state WHEN 'submitted' THEN 'cancelled'::rollout_status END,
                finished_at = CASE state WHEN 'submitted' THEN clock_timestamp() END
            WHERE (run_id, group_id) = (%s, %s) AND status IS NULL AND cancel_cause IS NULL""",
            (run, group),
        )
