"""Steps: PLAN fixes a step's groups before any compute, APPLY books what it made.

    planned → applied → durable

A queue row is bound to one step for ever and a step is re-executable, so a crash between PLAN and
the next checkpoint costs recomputation, never a group: the same plan is read again, in the same
order. PLAN reads what is ready and what runs in one plain statement (a locking read could see a
group's new state without its queue row), lets `domain.planning` decide, and writes the answer by
compare-and-set; a lost race changes nothing and is asked again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from domain import failpoints, planning
from domain.errors import LedgerError, ReplayDiverged, RunStopped
from domain.planning import Ready
from storage import binding, cancelling, candidates, exhaustion, holds, inputs, reopen, runs
from storage.candidates import Candidates
from storage.database import Tx, canonical, jsonb
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
        found = read_plan(tx, run, step, share)
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


def read_plan(tx: Tx, run: str, step: int, share: int | None = None) -> Planned | None:
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


def apply(
    tx: Tx,
    run: str,
    epoch: int,
    step: int,
    *,
    updated: bool,
    weights_sha256: bytes,
    cause: str | None,
    metrics: Mapping[str, Any],
    record: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Book a computed step and return the run's version; a repetition must say the same.

    Rollouts in flight that the new version makes too old are cancelled. Too many empty steps in a
    row fail the run, which its next poll raises.

    `updated` says whether the weights changed; without it `cause` says why. `record` is the step
    record of share 0; the digests of what was trained are added to it, for the audit. `others` are
    the records of the shares after it.

    Raises:
        LedgerError: the step is not planned on every share.
        ReplayDiverged: it was applied before with another result.
    """
    owner = runs.fence(tx, run, epoch)
    row = _step(tx, run, step)
    if row["state"] != "planned":
        _compare(run, step, row, updated, weights_sha256)
        return owner.version
    shares = tx.execute(
        "SELECT count(*) AS n FROM step_shares "
        "WHERE run_id = %s AND step = %s AND state = 'planned'",
        (run, step),
    ).fetchone()
    assert shares is not None
    if step != owner.next_step or shares["n"] < owner.shares:
        raise LedgerError(
            f"step {step} of run {run} cannot be applied: {shares['n']} of {owner.shares} shares "
            f"planned it, next step is {owner.next_step}"
        )
    groups = tx.execute(
        "SELECT 1 FROM queue WHERE run_id = %s AND step = %s "
        "ORDER BY group_id, part, gen FOR NO KEY UPDATE",
        (run, step),
    ).fetchall()
    tx.execute("UPDATE queue SET state = 'applied' WHERE run_id = %s AND step = %s", (run, step))
    tx.execute(
        """
        UPDATE steps SET state = 'applied', updated = %s, groups = %s, cause = %s,
            weights_sha256 = %s, plan_sha256 = %s, metrics = %s, applied_epoch = %s,
            applied_at = now()
        WHERE run_id = %s AND step = %s
        """,
        (
            updated,
            len(groups),
            cause,
            weights_sha256,
            plan_digest(tx, run, step),
            jsonb(metrics),
            epoch,
            run,
            step,
        ),
    )
    booked = {**record, "inputs": inputs.digests(tx, run, step)}
    for share, of_share in enumerate([booked, *others]):
        tx.execute(
            "UPDATE step_shares SET record = %s, waited_s = %s "
            "WHERE run_id = %s AND step = %s AND share = %s",
            (jsonb(of_share), of_share.get("waited"), run, step, share),
        )
    version = owner.version + updated
    tx.execute(
        "UPDATE runs SET version = %s, next_step = %s WHERE run_id = %s", (version, step + 1, run)
    )
    if updated:
        tx.execute(
            "INSERT INTO policy_versions(run_id, version, weights_sha256, state, trainer_epoch) "
            "VALUES (%s, %s, %s, 'computed', %s)",
            (run, version, weights_sha256, epoch),
        )
        _cancel_stale(tx, owner, version)
    elif not groups:
        failure = exhaustion.empty_steps(tx, owner, step)
        if failure is not None:
            runs.fail(tx, run, failure)
    return version


def verify_replay(
    tx: Tx, run: str, epoch: int, step: int, *, updated: bool, weights_sha256: bytes
) -> None:
    """Compare a recomputed step with what was booked, and count the replay.

    Under `exact = "order"` other bits are legal as long as the step updates alike: nobody has seen
    what it made, because it was not durable yet, so step and version take the new digest. A durable
    step keeps its own: it is replayed by a loop of one's own that lost the state it had taken.

    Raises:
        ReplayDiverged: names the step and both digests.
    """
    owner = runs.fence(tx, run, epoch)
    row = _step(tx, run, step)
    if row["state"] == "planned":
        raise LedgerError(f"step {step} of run {run} was never applied; there is nothing to replay")
    inexact = owner.config.trainer.exact == "order" and row["updated"] == updated
    if not inexact:
        _compare(run, step, row, updated, weights_sha256)
    elif updated:
        tx.execute(
            "UPDATE steps SET weights_sha256 = %s "
            "WHERE run_id = %s AND step = %s AND state = 'applied'",
            (weights_sha256, run, step),
        )
        tx.execute(
            "UPDATE policy_versions SET weights_sha256 = %s "
            "WHERE run_id = %s AND version = %s AND state = 'computed'",
            (weights_sha256, run, row["version_before"] + 1),
        )
    tx.execute(
        "UPDATE steps SET replays = replays + 1 WHERE run_id = %s AND step = %s", (run, step)
    )


def plan_digest(tx: Tx, run: str, step: int) -> bytes:
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
    found = read_plan(tx, run.id, step, share)
    assert found is not None
    return Planned(step=step, version_before=run.version, rows=found.rows, replayed=False)


def _planned_elsewhere(tx: Tx, run: Run, step: int) -> bool:
    row = tx.execute(
        "SELECT 1 FROM step_shares WHERE run_id = %s AND step = %s AND state = 'planned'",
        (run.id, step),
    ).fetchone()
    return row is not None


def _cancel_stale(tx: Tx, run: Run, version: int) -> None:
    """Stop running attempts that `version` makes too old; one that queues has no age."""
    schedule = run.config.schedule
    if schedule.stale_policy not in ("resubmit", "wait"):
        return
    rows = tx.execute(
        """
        SELECT group_id, sample, attempt FROM attempts WHERE run_id = %s AND state = 'running'
            AND cancel_cause IS NULL AND coalesce(oldest_version, pinned_version) < %s
        ORDER BY group_id, sample, attempt FOR NO KEY UPDATE
        """,
        (run.id, version - schedule.max_lag),
    ).fetchall()
    attempts = [(row["group_id"], row["sample"], row["attempt"]) for row in rows]
    cancelling.signal_attempts(tx, run.id, attempts, "stale")


def _step(tx: Tx, run: str, step: int) -> dict[str, Any]:
    row = tx.execute(
        "SELECT state, version_before, updated, weights_sha256 FROM steps "
        "WHERE run_id = %s AND step = %s FOR NO KEY UPDATE",
        (run, step),
    ).fetchone()
    if row is None:
        raise LedgerError(f"step {step} of run {run} was not planned")
    return row


def _compare(
    run: str, step: int, row: Mapping[str, Any], updated: bool, weights_sha256: bytes
) -> None:
    booked = bytes(row["weights_sha256"])
    if booked != weights_sha256 or row["updated"] != updated:
        raise ReplayDiverged(
            f"step {step} of run {run} made weights {booked.hex()[:16]} (updated: "
            f"{row['updated']}), its replay makes {weights_sha256.hex()[:16]} (updated: {updated}); "
            "use the same machine, thread count and package versions, or set "
            'trainer.exact = "order"'
        )
