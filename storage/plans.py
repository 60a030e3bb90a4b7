"""Plans: PLAN fixes a step's groups before any compute, and for ever.

A queue row is bound to one step for ever, so a crash between PLAN and the next checkpoint costs
recomputation, never a group: the same plan is read again, in the same order. PLAN reads what is ready
and what runs in one plain statement (a locking read could see a group's new state without its queue
row), lets `domain.planning` decide, and writes the answer by compare-and-set; a lost race changes
nothing and is asked again.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from domain import failpoints, planning
from domain.errors import LedgerError, RunStopped
from domain.planning import Ready
from storage import binding, candidates, exhaustion, holds, reopen, runs
from storage.candidates import Candidates
from storage.database import Tx, canonical
from storage.runs import Run


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A part of a group at its place in the step."""

    group: int
    part: int
    gen: int
    pos: int
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The groups of one step, in training order. No rows: the step is empty."""

    step: int
    version_before: int
    rows: tuple[PlannedRow, ...]
    replayed: bool  # read again, not decided now


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No step yet: too few groups (`wait`), others would grow too old (`hold`), a person is to
    look (`paused`), or the `end`."""

    kind: Literal["wait", "hold", "paused", "end"]
    reason: str
    slack: int | None = None
    binding_deadline: int | None = None
    binding_group: int | None = None


def plan(tx: Tx, run: str, epoch: int, share: int, step: int) -> Planned | Waiting:
    """Fix the groups of `step`, or say what it waits for.

    A step that is planned already is read again, whatever has changed since. Otherwise members
    that grew too old are sent back first (and that stands even if the answer is to wait), then the
    step's groups, what is cut and what is surplus are decided and written together.

    Raises:
        RunStopped, SourceBroken: the run has stopped, or another share's plan failed.
        LedgerError: the step is not the next one, or a group is newer than the trainer.
    """
    owner = runs.fence(tx, run, epoch)
    if _share_planned(tx, run, step, share):
        found = read(tx, run, step, share)
        assert found is not None
        return found
    runs.ensure_open(owner)
    if step != owner.next_step:
        raise LedgerError(f"step {step} of run {run} was not planned; next is {owner.next_step}")
    if owner.ended:
        return Waiting(kind="end", reason=f"the run's {owner.config.steps} steps are trained")
    if owner.state == "paused":
        return Waiting(kind="paused", reason=f"paused; `rollbook unpause {run}` goes on")
    _send_back_stale(tx, owner, share)
    seen = candidates.read(tx, owner, share, step)
    decision = _decide(owner, seen)
    try:
        with tx.transaction():  # a savepoint: what was sent back stays sent back
            return _write(tx, owner, share, step, seen, decision)
    except binding.LostRace as lost:
        return Waiting(kind="wait", reason=str(lost))


def fail_share(tx: Tx, run: str, epoch: int, share: int, step: int, error: str) -> None:
    """Record that a share could not plan `step`: every other share's PLAN of it raises this.

    Nothing happens if it has a plan. The next trainer forgets it and plans again (`take_over`).
    """
    owner = runs.fence(tx, run, epoch)
    binding.open_step(tx, owner, step)
    tx.execute(
        "INSERT INTO step_shares(run_id, step, share, epoch, state, error) "
        "VALUES (%s, %s, %s, %s, 'failed', %s) ON CONFLICT (run_id, step, share) DO NOTHING",
        (run, step, share, epoch, error),
    )


def read(tx: Tx, run: str, step: int, share: int | None = None) -> Planned | None:
    """The plan of a step (of one share, or of all), or None if it has none."""
    before = tx.execute(
        "SELECT version_before FROM steps WHERE run_id = %s AND step = %s", (run, step)
    ).fetchone()
    if before is None:
        return None
    rows = tx.execute(
        'SELECT group_id AS "group", part, gen, pos, lag FROM queue WHERE run_id = %(run)s '
        "AND step = %(step)s AND (%(share)s::int IS NULL OR share = %(share)s) "
        "ORDER BY share, pos",
        {"run": run, "step": step, "share": share},
    ).fetchall()
    return Planned(
        step=step,
        version_before=before["version_before"],
        rows=tuple(PlannedRow(**row) for row in rows),
        replayed=True,
    )


def digest(tx: Tx, run: str, step: int) -> bytes:
    """SHA-256 of which groups a step trains, in which order."""
    rows = tx.execute(
        "SELECT share, pos, group_id, part, gen FROM queue WHERE run_id = %s AND step = %s",
        (run, step),
    ).fetchall()
    return sha256(canonical(sorted(tuple(row.values()) for row in rows))).digest()


def _share_planned(tx: Tx, run: str, step: int, share: int) -> bool:
    """Whether this share planned the step already; raises what another share's plan failed with."""
    rows = tx.execute(
        "SELECT share, state, error FROM step_shares WHERE run_id = %s AND step = %s ORDER BY share",
        (run, step),
    ).fetchall()
    for row in rows:
        if row["state"] == "failed":
            raise RunStopped(f"share {row['share']} failed at step {step}: {row['error']}")
    return any(row["share"] == share for row in rows)


def _send_back_stale(tx: Tx, run: Run, share: int) -> None:
    schedule = run.config.schedule
    if schedule.stale_policy not in ("resubmit", "wait"):
        return
    rows = tx.execute(
        "SELECT group_id, gen FROM queue WHERE run_id = %s AND share = %s AND state = 'admitted' "
        "AND oldest_version < %s ORDER BY group_id",
        (run.id, share, run.version - schedule.max_lag),
    ).fetchall()
    for row in rows:
        reopen.reopen(tx, run.id, row["group_id"], row["gen"], cause="stale")
    if rows:
        failpoints.reach("plan_reopen")


def _decide(run: Run, seen: Candidates) -> planning.Decision:
    schedule, trainer = run.config.schedule, run.config.trainer
    if schedule.order == "dataset" and seen.exists and not seen.drawn:
        return planning.Wait(f"batch {run.next_step} is not drawn yet")
    return planning.plan(
        schedule.order,
        seen.ready,
        seen.running,
        current=run.version,
        groups_per_step=run.config.tasks.batch_size,
        bound=schedule.max_lag,
        hold=schedule.stale_policy == "wait",
        draining=seen.draining,
        overflow=trainer.overflow,
        rows=trainer.rows,
        width=trainer.width,
        admit=run.config.admit,
        exists=seen.exists,
        filter_zero_variance=schedule.filter_zero_variance,
    )


def _write(
    tx: Tx, run: Run, share: int, step: int, seen: Candidates, decision: planning.Decision
) -> Planned | Waiting:
    """Write the decision; what it is built on is checked again under locks.

    Raises:
        binding.LostRace: something changed in between.
    """
    surplus = decision.surplus if isinstance(decision, planning.Step) else ()
    binding.cancel_surplus(tx, run, step, seen, surplus)
    binding.cut(tx, run, step, seen, decision.cut)
    take: tuple[Ready, ...] = ()
    match decision:
        case planning.Wait():
            if run.config.schedule.order != "dataset":
                failure = exhaustion.unadmitted_groups(tx, run)
                if failure is None and any(cut.cause == "zero_variance" for cut in decision.cut):
                    failure = exhaustion.filtered_groups(tx, run, share)
                if failure is not None:
                    runs.fail(tx, run.id, failure)
            return Waiting(kind="wait", reason=decision.reason)
        case planning.Hold():
            group = decision.binding_groups[0]
            holds.note(tx, run.id, step, decision)
            return Waiting(
                kind="hold",
                reason=f"after another update group {group} and those due with it could not all "
                f"train by version {decision.binding_deadline}",
                slack=decision.slack,
                binding_deadline=decision.binding_deadline,
                binding_group=group,
            )
        case planning.End():
            if not _planned_elsewhere(tx, run, step):
                return Waiting(kind="end", reason="nothing is left to train")
            # Other shares go on: this one takes part without groups.
        case planning.Step():
            take = decision.take
    binding.bind(tx, run, share, step, seen, take)
    found = read(tx, run.id, step, share)
    assert found is not None
    return Planned(step=step, version_before=run.version, rows=found.rows, replayed=False)


def _planned_elsewhere(tx: Tx, run: Run, step: int) -> bool:
    row = tx.execute(
        "SELECT 1 FROM step_shares WHERE run_id = %s AND step = %s AND state = 'planned'",
        (run.id, step),
    ).fetchone()
    return row is not None
