"""APPLY, replay, checkpoints, empty steps and shares, through the ledger's tables."""

import asyncio
from typing import Any

import pytest

from activities import waits
from domain.errors import LedgerError, ReplayDiverged, RunStopped
from rollbook.progress import waiting_line
from storage import checkpoints, plans, reports, runs, steps
from storage.database import Ledger
from storage.plans import Planned, Waiting
from tests.rehearsal import Rehearsal, configuration, digest


def test_a_run_trains_batch_after_batch(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(), batches=3).begin()
    assert run.hand_over().submitted == 4  # batches 0 and 1: ahead = 1
    trained = []
    for step in range(3):
        for group in (2 * step + 1, 2 * step):
            run.complete(group)
        trained.append(run.planned())
        assert run.apply() == step + 1
        run.serve(step + 1)
        run.checkpoint()
        run.hand_over()
    assert trained == [[0, 1], [2, 3], [4, 5]]
    end = run.plan()
    assert isinstance(end, Waiting)
    assert end.kind == "end"
    assert set(run.states().values()) == {"trained"}


def test_a_run_ends_at_its_last_step_and_hands_over_nothing_beyond_it(ledger: Ledger) -> None:
    for order in ("dataset", "deadline"):
        name = f"r-{order}"
        config = configuration(name=name, steps=2, schedule={"order": order, "ahead": 1})
        run = Rehearsal(ledger, config).begin()
        run.train(2)
        assert sorted(run.states()) == [0, 1, 2, 3]
        assert isinstance(run.plan(), Waiting)
        assert run.hand_over().outstanding == 0


def test_applying_twice_books_once(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    assert run.apply(0) == 1
    assert run.apply(0) == 1  # the answer of the first commit got lost
    with pytest.raises(ReplayDiverged, match="step 0"):
        run.apply(0, updated=False)
    assert run.now().version == 1


def test_only_a_planned_step_is_applied(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    with pytest.raises(LedgerError, match="was not planned"):
        run.apply(0)
    with pytest.raises(LedgerError, match="next is 0"):
        run.plan(3)


def test_a_step_without_gradient_makes_no_version(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    assert run.apply(updated=False) == 0
    assert run.now().next_step == 1
    run.checkpoint()
    assert run.states()[0] == "trained"
    assert run.value("SELECT count(*) FROM policy_versions") == 1


def test_a_replay_must_make_the_same_weights(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    ledger.call(
        steps.verify_replay, "r1", run.epoch, 0, updated=True, weights_sha256=digest(("step", 0))
    )
    assert run.value("SELECT replays FROM steps WHERE step = 0") == 1
    for updated, weights in ((False, digest(("step", 0))), (True, digest("other"))):
        with pytest.raises(ReplayDiverged, match="thread count"):
            ledger.call(
                steps.verify_replay, "r1", run.epoch, 0, updated=updated, weights_sha256=weights
            )


def test_an_inexact_replay_gives_the_unpublished_version_its_new_digest(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(trainer={"exact": "order"})).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    ledger.call(
        steps.verify_replay, "r1", run.epoch, 0, updated=True, weights_sha256=digest("other bits")
    )
    now = run.value("SELECT weights_sha256 FROM policy_versions WHERE version = 1")
    assert bytes(now) == digest("other bits")
    assert bytes(run.value("SELECT weights_sha256 FROM steps")) == digest("other bits")
    with pytest.raises(ReplayDiverged):
        ledger.call(
            steps.verify_replay, "r1", run.epoch, 0, updated=False, weights_sha256=digest("x")
        )


def test_a_checkpoint_makes_the_steps_before_it_durable(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(checkpoint={"every": 2})).begin()
    run.train(2)
    assert [run.states()[g] for g in range(4)] == ["queue"] * 4
    assert run.checkpoint()
    assert not run.checkpoint()  # it is durable already
    assert [run.states()[g] for g in range(4)] == ["trained"] * 4
    newest = ledger.call(checkpoints.newest, "r1")
    assert (newest.step, newest.version, newest.data_position) == (2, 2, {"batch": 4})
    assert run.rows("SELECT DISTINCT state FROM steps") == [{"state": "durable"}]
    assert ledger.call(checkpoints.at, "r1", 1) is None


def test_a_checkpoint_of_another_version_or_the_future_is_refused(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    good: dict[str, Any] = {
        "step": 1,
        "version": 1,
        "prefix": "p",
        "manifest_sha256": digest("m"),
        "bytes": 1,
        "data_position": {"batch": 2},
        "rng": {},
        "world": {},
    }
    for wrong, message in (({"version": 0}, "claims version 0"), ({"step": 2}, "ahead of its")):
        with pytest.raises(LedgerError, match=message):
            ledger.call(checkpoints.record, "r1", run.epoch, **(good | wrong))
    assert ledger.call(checkpoints.record, "r1", run.epoch, **good)


def test_old_checkpoints_retire_and_are_deleted_after_their_objects(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(checkpoint={"keep": 2})).begin()
    for _ in range(3):
        run.train(1)
        run.checkpoint()
    run.do("UPDATE checkpoints SET tag = 'keep me' WHERE step = 0")
    assert [row.step for row in ledger.call(checkpoints.retire, "r1")] == [1]
    assert [row.step for row in ledger.call(checkpoints.retire, "r1")] == [1]  # until deleted
    ledger.call(checkpoints.deleted, "r1", [1])
    assert ledger.call(checkpoints.retire, "r1") == []
    assert ledger.call(checkpoints.newest, "r1").step == 3


def test_running_rollouts_that_a_version_makes_too_old_are_cancelled(ledger: Ledger) -> None:
    """S11, S12 and S12b, with max_lag = 1."""
    run = Rehearsal(ledger, configuration(schedule={"order": "deadline"})).begin()
    run.hand_over()
    run.start(2, sample=0)  # runs since version 0, while sample 1 queues

    def train(*groups: int) -> None:
        for group in groups:
            run.complete(group)
        assert run.planned() == list(groups)
        run.serve(run.apply())
        run.hand_over()

    def attempts() -> list[tuple[Any, ...]]:
        query = "SELECT sample, state, cancel_cause FROM attempts WHERE group_id = 2 ORDER BY 1"
        return [tuple(row.values()) for row in run.rows(query)]

    train(0, 1)
    assert attempts() == [(0, "running", None), (1, "submitted", None)]
    train(3, 4)
    assert attempts() == [(0, "running", "stale"), (1, "submitted", None)]
    (told,) = run.commands("cancel_sample")
    assert told["key"] == "run/r1/b000001/g2~0/s0.a0"
    assert told["payload"] == {
        "workflow_id": "run/r1/b000001/g2~0",
        "sample": 0,
        "attempt": 0,
        "cause": "stale",
    }


@pytest.mark.parametrize(
    "schedule",
    [
        {"stale_policy": "keep", "allow_unbounded_staleness": True},
        {"stale_policy": "mask_span", "allow_trajectory_loss": True},
    ],
    ids=["keep", "mask_span"],
)
def test_k7_without_a_bound_no_rollout_in_flight_is_cancelled_for_its_age(
    ledger: Ledger, schedule: dict[str, Any]
) -> None:
    config = configuration(schedule={"order": "admission", "max_lag": 0, **schedule})
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    run.start(0, sample=0)
    for groups in ((1, 2), (3, 4), (5, 6)):
        run.hand_over()
        for group in groups:
            run.complete(group)
        assert run.planned() == list(groups)
        run.serve(run.apply())
    assert run.commands("cancel_sample") == []
    assert run.value("SELECT cancel_cause FROM attempts WHERE group_id = 0 AND sample = 0") is None
    run.hand_over()
    run.complete(0)
    run.complete(7)
    plan = run.plan()
    assert isinstance(plan, Planned)  # and none is sent back for it
    assert [(row.group, row.gen, row.lag) for row in plan.rows] == [(0, 0, 3), (7, 0, 0)]


def test_empty_steps_in_a_row_fail_the_run_with_their_causes(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"max_empty_batches": 1})).begin()

    def empty_step() -> None:
        run.hand_over()
        step = run.now().next_step
        for group in (2 * step, 2 * step + 1):
            run.abandon(group)
        assert run.planned() == []
        run.apply(updated=False)

    empty_step()
    run.train(1)
    empty_step()
    assert run.now().state == "running"  # a trained step lies between
    empty_step()
    failed = run.now()
    assert failed.state == "failed"
    assert failed.failure is not None
    assert "2 steps in a row" in failed.failure
    assert "4 abandoned (max_attempts)" in failed.failure
    with pytest.raises(RunStopped, match="resume r1"):
        run.plan()
    with pytest.raises(RunStopped):
        run.hand_over()
    run.take_over()
    empty_step()
    assert run.now().state == "running"  # counted since the resume
    empty_step()
    assert run.now().state == "failed"


def test_groups_that_all_end_untrained_fail_the_run_in_other_orders(ledger: Ledger) -> None:
    config = configuration(schedule={"order": "deadline", "max_empty_batches": 1})
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    for group in (0, 1):
        run.abandon(group)
    assert isinstance(run.plan(), Waiting)
    assert run.now().state == "running"
    run.abandon(2)
    run.plan()
    assert run.now().state == "failed"
    run.take_over()
    run.hand_over()
    assert isinstance(run.plan(), Waiting)
    assert run.now().state == "running"


def test_a_paused_run_neither_plans_nor_hands_over(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    ledger.call(runs.pause, "r1")
    answer = run.plan()
    assert isinstance(answer, Waiting)
    assert (answer.kind, answer.reason) == ("paused", "paused; `rollbook unpause r1` goes on")
    assert run.hand_over().submitted == 0
    ledger.call(runs.unpause, "r1")
    assert run.planned() == [0, 1]


def test_every_share_plans_before_a_step_is_applied(ledger: Ledger) -> None:
    first = Rehearsal(ledger, configuration(), batches=1).begin(shares=2)
    second = Rehearsal(ledger, configuration(), batches=2, share=1)
    second.epoch = first.epoch
    first.hand_over()
    second.hand_over()
    assert sorted(first.states()) == [0, 1, 2, 3, 6, 7]  # batch 1 has no groups on share 0
    for group in (0, 1, 2, 3):
        first.complete(group)
    assert first.planned() == [0, 1]
    with pytest.raises(LedgerError, match="1 of 2 shares"):
        first.apply()
    assert second.planned() == [2, 3]
    first.apply()
    first.serve(1)
    # The data of share 0 has ended: it takes part without groups as soon as share 1 planned.
    answer = first.plan()
    assert isinstance(answer, Waiting)
    assert answer.kind == "end"
    second.hand_over()
    first.complete(6)
    first.complete(7)
    assert second.planned() == [6, 7]
    assert first.planned() == []
    assert first.apply() == 2
    all_rows = ledger.call(plans.read, "r1", 0)
    assert isinstance(all_rows, Planned)
    assert [row.group for row in all_rows.rows] == [0, 1, 2, 3]


def test_what_every_share_waits_for_is_told(ledger: Ledger) -> None:
    first = Rehearsal(ledger, configuration(), batches=2).begin(shares=2)
    second = Rehearsal(ledger, configuration(), batches=2, share=1)
    second.epoch = first.epoch

    def told() -> list[str]:
        found = asyncio.run(waits.of_run(None, ledger, "r1"))
        return [w.detail for w in found if w.on in ("groups", "trainer", "hold")]

    first.hand_over()
    second.hand_over()
    first.complete(0)
    assert told() == [
        "share 0: step 0 lacks 1 of 2 groups; 3 are sampled",
        "share 1: step 0 lacks 2 of 2 groups; 4 are sampled",
    ]
    first.complete(1)
    assert first.planned() == [0, 1]
    assert told() == ["share 1: step 0 lacks 2 of 2 groups; 4 are sampled"]
    shares = ledger.call(reports.waiting, "r1")
    assert [(row["share"], row["ready"], row["running"]) for row in shares] == [
        (0, 0, 2),
        (1, 0, 4),
    ]
    assert "0 + 0 groups ready · 2 + 4 sampling" in waiting_line(shares)
    second.complete(2)
    second.complete(3)
    assert second.planned() == [2, 3]
    assert told() == ["host:1 computes step 0"]
    first.apply()
    first.serve(1)
    ledger.call(plans.fail_share, "r1", second.epoch, 1, 1, "DataChanged: other tasks")
    assert "share 1: step 1 cannot be planned: DataChanged: other tasks" in told()


def test_a_share_that_cannot_plan_stops_the_others_until_the_next_trainer(ledger: Ledger) -> None:
    first = Rehearsal(ledger, configuration(), batches=1).begin(shares=2)
    second = Rehearsal(ledger, configuration(), batches=1, share=1)
    second.epoch = first.epoch
    first.hand_over()
    second.hand_over()
    for group in (0, 1, 2, 3):
        first.complete(group)
    ledger.call(plans.fail_share, "r1", second.epoch, 1, 0, "DataChanged: other tasks")
    ledger.call(plans.fail_share, "r1", second.epoch, 1, 0, "a later one is not kept")
    with pytest.raises(RunStopped, match=r"^share 1 failed at step 0: DataChanged: other tasks$"):
        first.plan()
    second.epoch = first.take_over()
    assert (first.planned(), second.planned()) == ([0, 1], [2, 3])
    ledger.call(plans.fail_share, "r1", second.epoch, 1, 0, "it has a plan")
    assert first.apply() == 1
    # Both shares have ended. A failure that was forgotten leaves no step for them to take part in.
    ledger.call(plans.fail_share, "r1", second.epoch, 1, 1, "once more")
    second.epoch = first.take_over()
    for share in (first, second):
        share.hand_over()
        answer = share.plan()
        assert isinstance(answer, Waiting)
        assert answer.kind == "end"
