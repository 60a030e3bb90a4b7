"""Steps: APPLY books what a planned step made, once; a replay must make the same.

    planned → applied → durable

A step is re-executable: its plan is read again (`storage/plans.py`), and what it makes is compared
with what was booked.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from domain.errors import LedgerError, ReplayDiverged
from storage import cancelling, exhaustion, inputs, plans, runs
from storage.database import Tx, jsonb
from storage.runs import Run


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
            plans.digest(tx, run, step),
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
