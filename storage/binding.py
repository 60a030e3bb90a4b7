"""Writing what PLAN decided: groups bound to their step, cut, or cancelled as surplus.

By compare-and-set on what the decision was made on: whatever changed meanwhile is a lost race, the
transaction writes nothing of the decision, and PLAN is asked again.
"""

from collections.abc import Sequence

from domain.errors import LedgerError
from domain.planning import Cut, Ready, Running
from storage import cancelling, evaluations
from storage.candidates import Candidates
from storage.database import Tx
from storage.runs import Run


class LostRace(Exception):
    """Another transaction changed what the decision was made on."""


def bind(tx: Tx, run: Run, share: int, step: int, seen: Candidates, take: Sequence[Ready]) -> None:
    """Bind the groups that are taken to the step, in this order and for ever.

    Raises:
        LedgerError: a group is newer than the trainer.
        LostRace: one of them was withdrawn.
    """
    for row in take:
        if row.version > run.version:
            raise LedgerError(
                f"group {row.group} holds tokens of version {row.version}, newer than the "
                f"trainer's {run.version}; the ledger and the trainer do not belong together"
            )
    keys = [(row.group, row.part, seen.gens[row.group, row.part]) for row in take]
    open_step(tx, run, step)
    bound = 0
    for pos, (group, part, gen) in enumerate(keys):
        bound += tx.execute(
            """
            UPDATE queue SET state = 'planned', step = %s, pos = %s, lag = %s - oldest_version
            WHERE (run_id, group_id, part, gen) = (%s, %s, %s, %s) AND state = 'admitted'
            """,
            (step, pos, run.version, run.id, group, part, gen),
        ).rowcount
    if bound != len(keys):
        raise LostRace("a group was withdrawn while the step was planned")
    tx.execute(
        "INSERT INTO step_shares(run_id, step, share, epoch, state, groups) "
        "VALUES (%s, %s, %s, %s, 'planned', %s)",
        (run.id, step, share, run.epoch, len(keys)),
    )


def open_step(tx: Tx, run: Run, step: int) -> None:
    """The step's row; the first share that plans it makes it."""
    tx.execute(
        "INSERT INTO steps(run_id, step, version_before, state, planned_epoch) "
        "VALUES (%s, %s, %s, 'planned', %s) ON CONFLICT (run_id, step) DO NOTHING",
        (run.id, step, run.version, run.epoch),
    )
    evaluations.pin(tx, run, step)


def cut(tx: Tx, run: Run, step: int, seen: Candidates, cut: Sequence[Cut]) -> None:
    """Take out of the queue what the step leaves over for ever.

    Raises:
        LostRace: one of them was withdrawn.
    """
    for item in cut:
        rows = run.config.trainer.rows
        cause = f"rows: needs {item.rows_needed} of {rows}" if item.cause == "rows" else item.cause
        _leave(tx, run, step, seen, item.row, "cut", cause)


def cancel_surplus(
    tx: Tx, run: Run, step: int, seen: Candidates, surplus: Sequence[Ready | Running]
) -> None:
    """Cancel what the batch no longer needs: admitted rows are withdrawn, sampling stops.

    Raises:
        LostRace: one of its groups moved on.
    """
    if not surplus:
        return
    groups = sorted({item.group for item in surplus})
    rows = tx.execute(
        "SELECT group_id, gen, state, workflow_id FROM groups "
        "WHERE run_id = %s AND group_id = ANY(%s) ORDER BY group_id FOR NO KEY UPDATE",
        (run.id, groups),
    ).fetchall()
    now = {row["group_id"]: row for row in rows}
    for item in surplus:
        if isinstance(item, Ready):
            gen, states = seen.gens[item.group, item.part], {"complete"}
        else:
            gen, states = seen.gens[item.group, None], {"submitted", "registered"}
        if now[item.group]["gen"] != gen or now[item.group]["state"] not in states:
            raise LostRace(f"group {item.group} changed while the step was planned")
    for item in surplus:
        if isinstance(item, Ready):
            _leave(tx, run, step, seen, item, "expired", "surplus")
    cancelling.stop_attempts(tx, run.id, groups, "surplus")
    tx.execute(
        "UPDATE groups SET state = 'cancelled', closed_cause = 'surplus', closed_step = %s "
        "WHERE run_id = %s AND group_id = ANY(%s)",
        (step, run.id, groups),
    )
    running = [row["workflow_id"] for row in rows if row["state"] == "submitted"]
    cancelling.close_workflows(tx, run.id, running, "surplus")


def _leave(
    tx: Tx, run: Run, step: int, seen: Candidates, row: Ready, state: str, cause: str
) -> None:
    left = tx.execute(
        """
        UPDATE queue SET state = %s, cause = %s, closed_step = %s
        WHERE (run_id, group_id, part, gen) = (%s, %s, %s, %s) AND state = 'admitted'
        """,
        (state, cause, step, run.id, row.group, row.part, seen.gens[row.group, row.part]),
    )
    if left.rowcount != 1:
        raise LostRace(f"group {row.group} was withdrawn while the step was planned")
