"""The straggler deadline: vectors G1 to G14, groups of four, quorum 2, allowance 100 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from domain.messages import BeginGroup
from domain.rollouts import Status
from storage import groups, reopen

Make = Callable[..., Any]


def deadline(
    make: Make, on_stragglers: str = "truncate", allowance: int = 100, **groups: Any
) -> Any:
    return make(
        groups={
            "size": 4,
            "completion": {
                "mode": "deadline",
                "min_members": 2,
                "max_straggler_tokens": allowance,
                "on_stragglers": on_stragglers,
            },
        }
        | groups,
        schedule={
            "order": "deadline",
            "stale_policy": "mask_span",
            "allow_trajectory_loss": True,
            "ahead": 1,
        },
        trainer={"estimator": "batch"},
    )


def begun(b: Any, samples: int = 4) -> int:
    group = b.group()
    for sample in range(samples):
        b.start(group, sample)
    return int(group)


def begin(b: Any, group: int, *, gen: int) -> bool:
    row = b.one("SELECT workflow_id FROM groups WHERE run_id = %s AND group_id = %s", b.run, group)
    claim = BeginGroup(
        run=b.run,
        group=group,
        gen=gen,
        workflow_id=row["workflow_id"],
        first_execution_run_id="x",
    )
    return bool(b.ledger.call(groups.begin, claim))


def done(b: Any, group: int, *samples: int) -> None:
    for sample in samples:
        b.sampled(group, sample)
        b.finish(group, sample)


def cut(b: Any, group: int, sample: int, **more: Any) -> Any:
    return b.finish(group, sample, None, status=Status.TRUNCATED, cause="group_deadline", **more)


def times(b: Any, group: int) -> tuple[bool, bool]:
    row = b.one(
        "SELECT quorum_at, deadline_reached_at FROM groups WHERE run_id = %s AND group_id = %s",
        b.run,
        group,
    )
    return row["quorum_at"] is not None, row["deadline_reached_at"] is not None


def test_g1_under_wait_there_is_no_quorum(make: Make) -> None:
    b = make()
    group = begun(b)
    done(b, group, 0, 1, 2)
    assert not b.sampled(group, 3, 10_000).deadline
    assert times(b, group) == (False, False)


def test_g2_one_finisher_starts_no_allowance(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    done(b, group, 0)
    assert not b.sampled(group, 1, 10_000).deadline
    assert times(b, group) == (False, False)


def test_g3_g4_the_allowance_counts_from_the_quorum_and_never_cuts_a_request(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    b.sampled(group, 2, 5_000)
    done(b, group, 0, 1)
    assert times(b, group) == (True, False)
    assert b.attempt(group, 2)["tokens_at_quorum"] == 5_000
    assert not b.sampled(group, 2, 99).deadline
    assert not b.sampled(group, 3, 40).deadline
    assert b.sampled(group, 2, 50).deadline
    assert times(b, group) == (True, True)
    assert b.sampled(group, 3, 1).deadline
    assert len(b.commands("deadline")) == 1


def test_g5_truncate_makes_a_whole_group(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    done(b, group, 0, 1)
    assert b.sampled(group, 2, 100).deadline
    assert b.sampled(group, 3, 1).deadline
    assert cut(b, group, 3).member
    assert cut(b, group, 2).member
    assert b.members(group) == [0, 1, 2, 3]
    assert b.close(group).members == 4


def test_g5_a_tail_without_a_verdict_joins_under_score_too(make: Make) -> None:
    b = deadline(make)
    b.sql("UPDATE runs SET truncation = 'score' WHERE run_id = %s", b.run)
    group = begun(b)
    done(b, group, 0, 1)
    early = b.finish(group, 2, None, status=Status.TRUNCATED, cause="tokens")
    assert (early.member, early.resubmit) == (False, "unscored")
    assert b.sampled(group, 3, 100).deadline
    assert cut(b, group, 3).member


def test_g6_discard_makes_a_partial_group_without_failures(make: Make) -> None:
    b = deadline(make, "discard")
    group = begun(b, samples=3)
    done(b, group, 0, 1)
    assert b.sampled(group, 2, 100).cancel_cause == "deadline"
    assert b.attempt(group, 3)["status"] == "cancelled"
    ref = b.finish(group, 2, None, status=Status.CANCELLED)
    assert (ref.member, ref.surplus, ref.resubmit) == (False, False, None)
    assert b.fail(group, 2, "cancelled").give_up
    assert not b.attempt(group, 2)["counts_as_failure"]
    assert b.close(group).members == 2
    assert b.queued(group)[0]["members"] == 2


def test_g6_a_tail_that_had_finished_its_last_request_joins(make: Make) -> None:
    b = deadline(make, "discard")
    group = begun(b)
    done(b, group, 0, 1)
    b.sampled(group, 3, 1)  # its verifier runs now
    b.sampled(group, 2, 100)
    assert b.finish(group, 3).member


def test_g7_carry_over_trains_the_finishers_now_and_the_tails_later(make: Make) -> None:
    b = deadline(make, "carry_over")
    group = begun(b)
    done(b, group, 0, 1)
    progress = b.sampled(group, 2, 100)
    assert (progress.deadline, progress.cancel_cause) == (True, None)
    verdicts = [b.close(group) for _ in range(3)]
    assert {(v.state, v.applied) for v in verdicts} == {("submitted", True)}
    assert [(q["part"], q["members"]) for q in b.queued(group)] == [(0, 2)]
    b.sampled(group, 2, 50)
    done(b, group, 3)
    b.finish(group, 2)
    verdicts = [b.close(group, part=1) for _ in range(3)]
    assert {(v.state, v.applied, v.members) for v in verdicts} == {("complete", True, 4)}
    assert [(q["part"], q["members"]) for q in b.queued(group)] == [(0, 2), (1, 2)]


def test_g7_a_cancel_between_the_parts_keeps_what_finished(make: Make) -> None:
    b = deadline(make, "carry_over")
    group = begun(b)
    done(b, group, 0, 1)
    b.sampled(group, 2, 100)
    b.close(group)
    done(b, group, 3)
    assert b.close(group, "cancelled", part=0).state == "complete"
    assert [(q["part"], q["members"]) for q in b.queued(group)] == [(0, 2), (1, 1)]
    assert b.attempt(group, 2)["cancel_cause"] == "surplus"


def test_g7_before_the_deadline_a_spare_is_no_tail(make: Make) -> None:
    b = deadline(make, "carry_over", oversample=1)
    group = begun(b, samples=5)
    done(b, group, 0, 1, 2, 3)
    assert times(b, group) == (True, False)
    verdict = b.close(group)
    assert (verdict.state, verdict.members) == ("complete", 4)
    assert [(q["part"], q["members"]) for q in b.queued(group)] == [(0, 4)]
    assert b.attempt(group, 4)["cancel_cause"] == "surplus"


def test_g8_a_member_before_the_deadline_changes_no_allowance(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    done(b, group, 0, 1)
    b.sampled(group, 3, 60)
    done(b, group, 2)
    assert b.attempt(group, 3)["tokens_at_quorum"] == 0
    assert b.sampled(group, 3, 40).deadline


def test_g9_a_tail_that_fails_before_the_deadline_counts_from_zero(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    b.sampled(group, 3, 500)
    done(b, group, 0, 1)
    assert b.fail(group, 3).next_attempt == 1
    b.start(group, 3, 1)
    assert b.attempt(group, 3, 1)["tokens_at_quorum"] == 0
    assert not b.sampled(group, 3, 99, attempt=1).deadline
    assert b.sampled(group, 3, 1, attempt=1).deadline


def test_g10_tails_that_do_not_sample_reach_no_deadline(make: Make) -> None:
    b = deadline(make)
    group = begun(b)
    done(b, group, 0, 1)
    b.start(group, 2)
    assert times(b, group) == (True, False)
    assert b.fail(group, 2, "timeout").next_attempt == 1


@pytest.mark.parametrize("cause", ["infra_error", "timeout", "stale"])
def test_g11_after_the_deadline_nothing_is_tried_again(make: Make, cause: str) -> None:
    b = deadline(make, max_attempts=1, max_stale=1)
    group = begun(b)
    done(b, group, 0, 1)
    b.sampled(group, 2, 100)
    assert b.fail(group, 3, cause).give_up
    assert b.state(group) == "submitted"
    cut(b, group, 2)
    assert b.close(group).members == 3


def test_g12_a_group_opened_again_starts_without_quorum(make: Make) -> None:
    b = make(
        groups={
            "size": 4,
            "completion": {
                "mode": "deadline",
                "min_members": 2,
                "max_straggler_tokens": 100,
                "on_stragglers": "truncate",
            },
        },
        schedule={"max_lag": 1, "allow_trajectory_loss": True},
    )
    group = begun(b)
    b.serve(1)
    b.serve(2)
    done(b, group, 0)
    for sample in (1, 2, 3):
        b.sampled(group, sample, 100, version=2)
    b.finish(group, 1)
    b.sampled(group, 2, 100, version=2)
    cut(b, group, 2)
    cut(b, group, 3)
    b.sql("UPDATE attempts SET oldest_version = 2 WHERE run_id = %s AND sample > 0", b.run)
    b.close(group)
    assert b.ledger.call(reopen.reopen, b.run, group, 0, cause="stale")
    assert times(b, group) == (False, False)
    assert b.members(group) == [1, 2, 3]
    assert b.attempt(group, 0)["resubmitted_as"] == "stale"
    assert b.attempt(group, 0, 1)["state"] == "submitted"
    assert b.rollout(group, 0, attempt=1).member
    assert b.close(group, gen=1).members == 4


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_members_that_a_group_kept_are_its_quorum_from_the_start(make: Make, kept: int) -> None:
    b = deadline(make)
    group = begun(b)
    done(b, group, *range(kept))
    assert b.ledger.call(reopen.reopen, b.run, group, 0, cause="lost")
    assert times(b, group) == (False, False)
    begin(b, group, gen=1)
    assert times(b, group) == (kept >= 2, False)
    for sample in range(kept, 4):
        b.start(group, sample, 1)
    assert b.sampled(group, 3, 99, attempt=1).deadline is False
    assert b.sampled(group, 3, 1, attempt=1).deadline is (kept >= 2)
    assert not begin(b, group, gen=0)


@pytest.mark.parametrize("order", [(3, 4), (4, 3)])
def test_g13_of_the_tails_cut_together_the_lower_sample_joins(
    make: Make, order: tuple[int, int]
) -> None:
    b = deadline(make, oversample=1)
    group = begun(b, samples=5)
    done(b, group, 0, 1, 2)
    assert b.sampled(group, 3, 100).deadline
    b.sampled(group, 4, 1)
    for sample in order:
        cut(b, group, sample)
    assert b.members(group) == [0, 1, 2, 3]
    assert b.attempt(group, 4)["surplus"]
    assert b.close(group).members == 4


def test_g14_tails_that_all_fail_leave_no_second_part(make: Make) -> None:
    b = deadline(make, "carry_over")
    group = begun(b)
    done(b, group, 0, 1)
    b.sampled(group, 2, 100)
    b.close(group)
    assert b.fail(group, 2).give_up
    assert b.fail(group, 3).give_up
    assert b.close(group, part=1).state == "complete"
    assert [q["part"] for q in b.queued(group)] == [0]


def test_without_an_allowance_the_quorum_is_the_deadline(make: Make) -> None:
    b = deadline(make, allowance=0)
    group = begun(b)
    done(b, group, 0, 1)
    assert times(b, group) == (True, True)
    assert b.start(group, 2).deadline
