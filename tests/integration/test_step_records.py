"""The record of a step: every resubmission, cancellation, abandonment and cut, each in one record."""

from typing import Any

from domain.rollouts import Status
from rollbook import SchedulerRecord
from storage.database import Ledger
from storage.plans import Planned
from storage.records import CAUSES
from tests.rehearsal import configuration, digest
from tests.staged import Staged
from trainer import booking
from trainer.booking import Done

NOTHING = dict.fromkeys(CAUSES, 0)


def staged(ledger: Ledger, **sections: Any) -> Staged:
    """One rollout a group, of four tokens a segment."""
    run = Staged(
        ledger,
        configuration(
            groups={"size": 1} | sections.pop("groups", {}),
            trainer={"estimator": "mean"} | sections.pop("trainer", {}),
            **sections,
        ),
    )
    run.begin()
    run.hand_over_and_deliver()
    return run


def step(run: Staged, waited: float = 0.0) -> tuple[list[int], SchedulerRecord]:
    """Train a step and serve what it made; its groups and its record, which SQL has too."""
    plan = run.plan()
    assert isinstance(plan, Planned), plan
    done = Done(
        updated=True,
        weights_sha256=digest(("step", plan.step)),
        optimizer_updates=2,
        metrics={"loss": 0.5},
    )
    waits = [booking.of_share(plan, {"groups": waited, "publish": 0.25})]
    booked = booking.book(run.ledger, run.run, run.epoch, plan, done, waits)
    record = SchedulerRecord.of(booked)
    (stored,) = run.rows(
        "SELECT h.record, h.waited_s, s.metrics FROM step_shares h JOIN steps s "
        "USING (run_id, step) WHERE run_id = %s AND step = %s",
        run.run,
        plan.step,
    )
    assert (
        SchedulerRecord.of(booking.Booked(record=stored["record"], metrics=stored["metrics"]))
        == record
    )
    assert stored["waited_s"] == record.waited
    run.serve(record.updates)
    run.hand_over_and_deliver()
    return [row.group for row in plan.rows], record


def test_each_fate_of_a_rollout_is_counted_once_under_its_own_name(ledger: Ledger) -> None:
    run = staged(
        ledger,
        tasks={"batch_size": 6},
        groups={"admit": 3, "max_attempts": 2},
        trainer={"truncation": "score", "overflow": "cut", "rows": 1, "width": 16},
        budget={"max_generated_tokens": 12, "segment_tokens": 12, "max_context_tokens": 16},
    )
    run.begin_rollout(0, 0)
    run.end_rollout(0, 0, None, status=Status.INFRA_ERROR)
    for group, cause in ((1, "cancelled"), (3, "timeout")):
        run.cluster.close(run.workflow(group), run.begin_rollout(group, 0), cause)
    run.begin_rollout(2, 0)
    run.end_rollout(2, 0, None, status=Status.TRUNCATED, cause="tokens")
    run.begin_rollout(3, 0)
    run.end_rollout(3, 0, None, status=Status.INFRA_ERROR)  # abandoned: nothing follows
    run.begin_rollout(5, 0)
    run.roll_out(0, 0)
    run.roll_out(1, 0)
    run.roll_out(4, 0, segments=4)  # a whole row
    run.roll_out(2, 0)
    run.begin_rollout(6, 0)  # of the next batch, under version 0

    groups, record = step(run, waited=1.5)
    assert groups == [0, 1, 2]
    assert record.resubmitted == NOTHING | dict.fromkeys(
        ("infra_error", "cancelled", "unscored", "timeout"), 1
    )
    # Of `cancelled`: the surplus rollout of group 5, and the one that ran out of time.
    assert (record.cancelled, record.abandoned, record.cut) == (2, 1, 1)
    assert (record.updates, record.version, record.lag, record.groups) == (1, 0, 0, 3)
    assert record.waited == 1.75
    assert record.metrics["loss"] == 0.5
    assert record.metrics["waited/groups"] == 1.5
    assert record.metrics["publish_lag"] == 1

    run.end_rollout(6, 0)
    run.roll_out(7, 0)
    run.roll_out(8, 0)
    groups, record = step(run)
    assert groups == [6, 7, 8]
    assert record.resubmitted == NOTHING
    assert (record.cancelled, record.abandoned, record.cut) == (3, 0, 0)  # surplus: 9, 10, 11
    assert (record.updates, record.version, record.lag) == (2, 0, 1)


def test_what_an_update_made_too_old_is_counted_by_the_record_that_follows(ledger: Ledger) -> None:
    run = staged(
        ledger, tasks={"batch_size": 1}, schedule={"order": "admission", "ahead": 1, "max_lag": 1}
    )
    run.begin_rollout(0, 0)
    records = []
    for group in (1, 2, 3):
        run.roll_out(group, 0)
        if group == 3:  # told to stop at version 2; now it does
            run.cluster.sample(run.workflow(0), run.workflow(0).live[0])
            run.end_rollout(0, 0, None, status=Status.CANCELLED)
        groups, record = step(run)
        assert groups == [group]
        records.append(record)
    assert [record.resubmitted["stale"] for record in records] == [0, 0, 1]
    assert [record.cancelled for record in records] == [0, 0, 1]
    assert [sum(record.resubmitted.values()) for record in records] == [0, 0, 1]


def test_the_siblings_of_an_abandoned_group_are_counted_as_cancelled(ledger: Ledger) -> None:
    run = staged(ledger, tasks={"batch_size": 2}, groups={"size": 3, "max_attempts": 1})
    for sample in range(3):
        run.begin_rollout(0, sample)
    run.end_rollout(0, 1, None, status=Status.INFRA_ERROR)
    run.roll_out(1, 0, 1, 2)
    groups, record = step(run)
    assert groups == [1]
    assert (record.cancelled, record.abandoned, record.cut) == (2, 1, 0)
    assert record.resubmitted == NOTHING
