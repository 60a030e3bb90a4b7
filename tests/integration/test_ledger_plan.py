"""The planning vectors P1–P22 of the design, through the ledger's tables."""

from collections.abc import Sequence
from typing import Any

import pytest

from domain.errors import LedgerError, RunStopped
from storage import holds, reports
from storage.database import Ledger
from storage.plans import Planned, Waiting
from tests.rehearsal import Rehearsal, configuration

FILTERED = {"order": "deadline", "filter_zero_variance": True}


def batch_of(ledger: Ledger, size: int = 4, **sections: Any) -> Rehearsal:
    """Order `dataset`, one rollout a group, batch 0 handed over."""
    run = Rehearsal(
        ledger,
        configuration(
            **{
                "tasks": {"batch_size": size},
                "groups": {"size": 1} | sections.pop("groups", {}),
                "trainer": {"estimator": "mean"} | sections.pop("trainer", {}),
            }
            | sections
        ),
    ).begin()
    run.hand_over()
    return run


def at_version_3(ledger: Ledger, *, batches: int = 100, **schedule: Any) -> Rehearsal:
    """c = 3, B = 2, S = 2: groups 0-5 are trained, 6 and 7 (and 8, 9, if drawn) submitted."""
    config = configuration(
        groups={"size": 1},
        trainer={"estimator": "mean"},
        schedule={"order": "deadline", "max_lag": 2} | schedule,
    )
    run = Rehearsal(ledger, config, batches=batches).begin()
    run.train(3)
    return run


def waits(answer: Planned | Waiting) -> str:
    assert isinstance(answer, Waiting), answer
    return answer.kind


def test_p1_a_batch_is_stored_in_data_order(ledger: Ledger) -> None:
    run = batch_of(ledger)
    for group in (1, 2, 0, 3):
        run.complete(group)
    assert run.planned() == [0, 1, 2, 3]


def test_p2_a_running_group_is_waited_for(ledger: Ledger) -> None:
    run = batch_of(ledger)
    for group in (1, 2, 0):
        run.complete(group)
    assert waits(run.plan()) == "wait"


def test_p3_an_abandoned_group_is_not_waited_for(ledger: Ledger) -> None:
    run = batch_of(ledger)
    for group in (1, 2, 0):
        run.complete(group)
    run.abandon(3)
    assert run.planned() == [0, 1, 2]


def test_p4_the_rest_of_the_batch_is_surplus(ledger: Ledger) -> None:
    run = batch_of(ledger, groups={"admit": 2})
    run.complete(3)
    run.complete(1)
    run.start(0)
    assert run.planned() == [1, 3]
    states = run.states()
    assert (states[0], states[2]) == ("cancelled", "cancelled")
    assert run.group(0)["closed_cause"] == "surplus"
    causes = run.rows(
        "SELECT group_id, state, status, cancel_cause, surplus, counts_as_failure FROM attempts "
        "WHERE group_id IN (0, 2) ORDER BY 1"
    )
    assert [tuple(row.values()) for row in causes] == [
        (0, "running", None, "surplus", True, False),
        (2, "finished", "cancelled", "surplus", True, False),
    ]
    closed = [row["payload"] for row in run.commands("close_group")]
    assert [c["cause"] for c in closed] == ["surplus", "surplus"]
    assert [c["workflow_id"] for c in closed] == ["run/r1/b000000/g0~0", "run/r1/b000000/g2~0"]


def test_p5_a_complete_surplus_group_is_withdrawn(ledger: Ledger) -> None:
    run = batch_of(ledger, groups={"admit": 2})
    for group in (3, 1, 0):
        run.complete(group)
    assert run.planned() == [1, 3]
    states = run.states()
    assert [states[g] for g in range(4)] == ["cancelled", "queue", "cancelled", "queue"]
    assert run.rows("SELECT state, cause FROM queue WHERE group_id = 0") == [
        {"state": "expired", "cause": "surplus"}
    ]


def test_p6_and_p7_a_group_that_does_not_fit_is_cut_when_the_step_is_full(ledger: Ledger) -> None:
    run = batch_of(ledger, groups={"admit": 2}, trainer={"overflow": "cut", "rows": 2, "width": 64})
    run.complete(3, lengths=[64, 32])
    run.complete(1, lengths=[64])
    assert waits(run.plan()) == "wait"
    assert run.states()[1] == "queue"  # nothing is written yet
    run.complete(0, lengths=[32])
    assert run.planned() == [0, 3]
    assert run.states()[1] == "cut"
    assert run.states()[2] == "cancelled"


def test_p8_and_p10_a_group_too_long_for_the_step_is_cut_with_its_rows(ledger: Ledger) -> None:
    run = batch_of(ledger, size=2, trainer={"overflow": "cut", "rows": 2, "width": 64})
    run.complete(1, lengths=[40, 40])
    run.complete(0, lengths=[64, 64, 64])
    assert run.planned() == [1]
    assert run.value("SELECT cause FROM queue WHERE group_id = 0") == "rows: needs 3 of 2"


def test_p9_a_batch_whose_groups_all_ended_is_an_empty_step(ledger: Ledger) -> None:
    run = batch_of(ledger, size=2)
    run.abandon(0)
    run.abandon(1)
    assert run.planned() == []
    assert run.apply(updated=False) == 0
    assert run.now().next_step == 1


def test_p11_a_step_beyond_the_data_ends_the_run(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(), batches=1).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    assert waits(run.plan()) == "end"


def test_p12_the_oldest_groups_go_first(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="resubmit")
    run.complete(6, version=3)
    run.complete(7, version=2)
    run.complete(8, version=2)
    assert run.planned() == [7, 8]


def test_p13_to_p16_the_short_rest_trains_only_when_nothing_more_comes(ledger: Ledger) -> None:
    run = at_version_3(ledger, batches=4, stale_policy="resubmit")
    run.complete(6)
    assert waits(run.plan()) == "wait"  # P13: 7 still runs
    run.abandon(7)
    assert run.planned() == [6]  # P14
    run.apply()
    assert waits(run.plan()) == "end"  # P16


def test_p15_a_place_that_can_be_filled_is_waited_for(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="resubmit")
    run.complete(6)
    for group in (7, 8, 9):
        run.abandon(group)
    assert waits(run.plan()) == "wait"
    assert run.hand_over().submitted == 3


def test_p17_to_p19_advancing_is_held_for_a_group_at_its_deadline(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="wait")
    run.complete(6, version=3)
    run.complete(7, version=3)
    run.start(8)
    run.do("UPDATE attempts SET oldest_version = 1, newest_version = 1 WHERE group_id = 8")
    run.abandon(9)
    held = run.plan()
    assert isinstance(held, Waiting)
    assert (held.kind, held.binding_deadline, held.slack, held.binding_group) == ("hold", 3, -1, 8)
    seen = run.rows("SELECT slack, binding_deadline, ready, running FROM waiting")
    assert seen == [{"slack": -1, "binding_deadline": 3, "ready": 2, "running": 1}]
    since = ledger.call(holds.binding, "r1")
    assert since is not None
    assert since[0] == 8
    (waiting,) = ledger.call(reports.waiting, "r1")
    assert (waiting["binding_group"], waiting["held_since"]) == since
    run.plan()
    assert ledger.call(holds.binding, "r1") == since  # one hold, however often it is asked
    assert ledger.call(holds.gauge, run.now()) == {"staleness/slack": -1.0}
    run.end(8, 0, version=1)
    run.admit(8)
    assert run.planned() == [8, 6]
    assert ledger.call(holds.gauge, run.now()) == {"staleness/slack": 3.0}


def test_the_group_that_binds_now_is_named_when_another_one_did_before(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="wait")
    run.complete(6, version=3)
    run.complete(7, version=3)
    for group in (8, 9):
        run.start(group)
        run.do(
            "UPDATE attempts SET oldest_version = 1, newest_version = 1 WHERE group_id = %s", group
        )
    held = run.plan()
    assert isinstance(held, Waiting)
    assert (held.slack, held.binding_group) == (-2, 8)
    run.end(8, 0, version=1)
    run.admit(8)  # complete, and not trained yet
    held = run.plan()
    assert isinstance(held, Waiting)
    assert (held.slack, held.binding_group) == (-1, 9)
    since = ledger.call(holds.binding, "r1")
    assert since is not None
    assert since[0] == 9


def test_p20_admission_takes_completion_order(ledger: Ledger) -> None:
    run = at_version_3(ledger, order="admission", stale_policy="resubmit")
    for group in (7, 8, 6):
        run.complete(group)
    assert run.planned() == [7, 8]


def test_p21_a_part_counts_as_a_group(ledger: Ledger) -> None:
    config = configuration(
        groups={
            "completion": {
                "mode": "deadline",
                "min_members": 1,
                "max_straggler_tokens": 8,
                "on_stragglers": "carry_over",
            }
        },
        schedule={"order": "admission", "stale_policy": "keep", "allow_unbounded_staleness": True},
        trainer={"estimator": "batch"},
    )
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    run.start(0)
    run.end(0, 0)
    run.do("UPDATE groups SET quorum_at = now(), deadline_reached_at = now() WHERE group_id = 0")
    run.admit_part(0, 0)
    run.complete(1)
    run.end(0, 1)
    run.admit(0, part=1)
    plan = run.plan()
    assert isinstance(plan, Planned)
    assert [(row.group, row.part) for row in plan.rows] == [(0, 0), (1, 0)]
    run.apply()
    run.serve(1)
    run.hand_over()
    run.complete(2)
    plan = run.plan()
    assert isinstance(plan, Planned)
    assert [(row.group, row.part) for row in plan.rows] == [(0, 1), (2, 0)]


def test_p22_accumulation_never_cuts(ledger: Ledger) -> None:
    run = batch_of(ledger, size=1, trainer={"rows": 2, "width": 64})
    run.complete(0, lengths=[64] * 9)
    assert run.planned() == [0]


def test_groups_without_variance_give_their_place_to_others(ledger: Ledger) -> None:
    config = configuration(schedule=FILTERED)
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    run.complete(0)  # both rewards are 1
    for group in (1, 2):
        run.start(group)
        run.end(group, 0, reward=0.0)
        run.end(group, 1, reward=1.0)
        run.admit(group)
    assert run.planned() == [1, 2]
    assert run.states()[0] == "cut"
    assert run.value("SELECT cause FROM queue WHERE group_id = 0") == "zero_variance"


def test_filtered_groups_leave_even_when_the_step_must_wait(ledger: Ledger) -> None:
    config = configuration(schedule=FILTERED)
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    for group in range(4):
        run.complete(group)
    assert waits(run.plan()) == "wait"
    assert [at for _, at in run.states().items()] == ["cut"] * 4
    assert run.hand_over().submitted == 4


def test_groups_that_only_fail_stop_the_run_with_their_causes(ledger: Ledger) -> None:
    schedule = {"order": "admission", "ahead": 3, "max_lag": 3, "max_empty_batches": 2}
    run = Rehearsal(ledger, configuration(schedule=schedule)).begin()

    def abandon(*groups: int) -> None:
        for group in groups:
            run.hand_over()
            run.do(
                "UPDATE attempts SET status = 'infra_error', error_type = 'VerifierFailed', "
                "error = 'no judge answers', state = 'finished', finished_at = now() "
                "WHERE group_id = %s AND sample = 0",
                group,
            )
            run.abandon(group)
            assert waits(run.plan()) == "wait"

    abandon(0, 1, 2, 3)
    run.hand_over()
    run.complete(4)  # one that is admitted ends the row
    abandon(5, 6, 7, 8)
    assert run.now().state == "running"
    abandon(9)
    found = run.now()
    assert found.state == "failed"
    assert found.failure is not None
    assert "5 groups in a row ended without training" in found.failure
    assert "max_empty_batches x tasks.batch_size = 4" in found.failure
    assert "5 abandoned (max_attempts), most often after VerifierFailed: no judge answers" in (
        found.failure
    )
    with pytest.raises(RunStopped, match="in a row ended without training"):
        run.plan()


def test_rewards_that_never_differ_stop_the_run_with_cause_and_remedy(ledger: Ledger) -> None:
    config = configuration(schedule=FILTERED | {"max_filtered_batches": 2})
    run = Rehearsal(ledger, config).begin()

    def sample(groups: Sequence[int], rewards: tuple[float, float] = (1.0, 1.0)) -> None:
        run.hand_over()
        for group in groups:
            run.start(group)
            for member, reward in enumerate(rewards):
                run.end(group, member, reward=reward)
            run.admit(group)

    sample((0, 1, 2))
    assert waits(run.plan()) == "wait"
    sample((3,), rewards=(0.0, 1.0))  # one that teaches ends the row
    for groups in ((4, 5), (6, 7)):
        sample(groups)
        assert waits(run.plan()) == "wait"
    assert run.now().state == "running"
    sample((8,))
    run.plan()
    found = run.now()
    assert found.state == "failed"
    assert found.failure is not None
    assert "5 groups in a row had equal rewards" in found.failure
    assert "max_filtered_batches x tasks.batch_size = 4" in found.failure
    assert "correct the verifier and resume" in found.failure
    with pytest.raises(RunStopped, match="equal rewards"):
        run.plan()
    run.take_over()  # resumed: they count from here
    sample((9, 10, 11))
    assert waits(run.plan()) == "wait"
    assert run.now().state == "running"


def test_an_overlong_rollout_gives_a_group_of_equal_rewards_its_variance(ledger: Ledger) -> None:
    config = configuration(
        schedule=FILTERED, trainer={"overlong_from": 8, "overlong_to": 16, "estimator": "mean"}
    )
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    for group, tokens in ((0, 8), (1, 9), (2, 30)):
        run.start(group)
        for member, sampled in enumerate((4, tokens)):
            run.do(
                "UPDATE attempts SET policy_tokens = %s WHERE group_id = %s AND sample = %s",
                sampled,
                group,
                member,
            )
            run.end(group, member)
        run.admit(group)
    assert run.planned() == [1, 2]
    assert run.states()[0] == "cut"


def test_a_group_in_which_one_rollout_trains_is_filtered_too(ledger: Ledger) -> None:
    config = configuration(
        groups={"size": 3},
        schedule=FILTERED,
        trainer={"truncation": "drop"},
        tasks={"batch_size": 1},
    )
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    for group, status in ((0, "truncated"), (1, "completed")):
        run.start(group)
        run.end(group, 0, reward=1.0)
        run.end(group, 1, reward=0.0, status=status)
        run.end(group, 2, reward=0.0, status="truncated")
        run.admit(group)
    assert run.planned() == [1]
    assert run.states()[0] == "cut"


def test_a_group_newer_than_the_trainer_is_refused(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="resubmit")
    run.do(
        "INSERT INTO policy_versions(run_id, version, weights_sha256, state, trainer_epoch) "
        "SELECT 'r1', 4, weights_sha256, 'computed', 1 FROM policy_versions WHERE version = 0"
    )
    run.complete(6, version=4)
    run.complete(7, version=4)
    with pytest.raises(LedgerError, match="newer than the trainer's 3"):
        run.plan()


def test_a_plan_is_read_again_word_for_word(ledger: Ledger) -> None:
    run = at_version_3(ledger, stale_policy="resubmit")
    for group in (6, 7, 8, 9):
        run.complete(group)
    first = run.plan()
    run.take_over()
    again = run.plan()
    assert isinstance(first, Planned)
    assert isinstance(again, Planned)
    assert again.rows == first.rows
    assert (first.replayed, again.replayed) == (False, True)
