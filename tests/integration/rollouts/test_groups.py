"""How groups begin and end, and what follows a failed attempt: every bound, every race."""

from collections.abc import Callable
from typing import Any

import pytest

from domain.errors import LedgerError
from domain.messages import BeginGroup, NextAttempt
from domain.rollouts import Status
from storage import cancelling, groups

Make = Callable[..., Any]


def begin(b: Any, group: int, execution: str, gen: int = 0) -> bool:
    workflow = f"run/{b.run}/b{group:06d}/g{group}~{gen}"
    claim = BeginGroup(
        run=b.run,
        group=group,
        gen=gen,
        workflow_id=workflow,
        first_execution_run_id=execution,
    )
    return bool(b.ledger.call(groups.begin, claim))


def test_one_execution_claims_a_generation_and_may_claim_it_again(make: Make) -> None:
    b = make()
    group = b.group()
    assert [begin(b, group, who) for who in ("a", "a", "b", "a")] == [True, True, False, True]
    assert not begin(b, group, "a", gen=1)
    b.close(group, "cancelled")
    assert not begin(b, group, "a")


def test_a_complete_group_stands_in_the_queue_once(make: Make) -> None:
    b = make(groups={"size": 2})
    b.serve(1)
    group = b.group()
    b.start(group, 0)
    b.sql("UPDATE attempts SET pinned_version = 0 WHERE run_id = %s AND false", b.run)
    b.sampled(group, 0, 4, version=0)
    b.sampled(group, 0, 2)
    b.finish(group, 0)
    b.rollout(group, 1)
    verdicts = [b.close(group) for _ in range(3)]
    assert {(v.state, v.applied, v.members) for v in verdicts} == {("complete", True, 2)}
    (row,) = b.queued(group)
    assert (row["part"], row["members"], row["oldest_version"]) == (0, 2, 0)
    assert row["chain_lengths"] == [10, 5]


def test_a_group_that_lacks_members_is_not_complete(make: Make) -> None:
    b = make(groups={"size": 2})
    group = b.group()
    b.rollout(group, 0)
    with pytest.raises(LedgerError, match="1 of 2 members"):
        b.close(group)


def test_a_finish_of_another_generation_changes_nothing(make: Make) -> None:
    b = make(groups={"size": 1}, trainer={"estimator": "batch"})
    group = b.group()
    b.rollout(group, 0)
    verdict = b.close(group, gen=1)
    assert (verdict.state, verdict.applied) == ("submitted", False)
    assert b.queued(group) == []


@pytest.mark.parametrize("outcome", ["abandoned", "expired", "cancelled"])
def test_a_group_that_ends_otherwise_cancels_what_lives(make: Make, outcome: str) -> None:
    b = make(groups={"size": 3})
    group = b.group()
    b.rollout(group, 0)
    b.start(group, 1)
    verdicts = [b.close(group, outcome, cause="why") for _ in range(2)]
    assert [(v.state, v.applied) for v in verdicts] == [(outcome, True)] * 2
    assert b.attempt(group, 1)["cancel_cause"] is not None
    assert b.attempt(group, 1)["state"] == "running"
    assert b.attempt(group, 2)["status"] == "cancelled"
    assert [key.rsplit("/", 1)[1] for key in b.commands("cancel_sample")] == ["s1.a0"]
    assert b.sampled(group, 1).cancel_cause is not None


def test_a_broken_source_fails_the_run_and_keeps_the_group(make: Make) -> None:
    b = make()
    group = b.group()
    b.rollout(group, 0)
    verdict = b.close(group, "source_broken", cause="reset returned 7")
    assert (verdict.state, verdict.applied) == ("registered", True)
    run = b.one("SELECT state, failure FROM runs WHERE run_id = %s", b.run)
    assert run["state"] == "failed"
    assert "reset returned 7" in run["failure"]
    assert b.members(group) == [0]
    assert not b.close(group, "source_broken", cause="again").applied


def test_a_failure_is_tried_again_under_the_version_served_now(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.serve(1)
    following = [b.fail(group, 0, error="boom", error_type="ValueError") for _ in range(3)]
    assert following == [NextAttempt(next_attempt=1, cause="infra_error")] * 3
    row = b.attempt(group, 0)
    assert (row["status"], row["resubmitted_as"], row["error"]) == (
        "infra_error",
        "infra_error",
        "boom",
    )
    assert row["counts_as_failure"]
    assert b.attempt(group, 0, 1)["submitted_version"] == 1


def test_s19_failures_of_every_kind_abandon_on_the_third(make: Make) -> None:
    b = make(groups={"size": 4, "max_attempts": 3}, trainer={"truncation": "score"})
    group = b.group()
    b.start(group, 1)
    assert b.fail(group, 0, "infra_error").next_attempt == 1
    assert b.fail(group, 0, "timeout", attempt=1).next_attempt == 2
    b.rollout(group, 0, attempt=2, reward=None, status=Status.TRUNCATED, cause="tokens")
    answer = b.fail(group, 0, "unscored", attempt=2, status="truncated")
    assert (answer.close, answer.cause) == ("abandoned", "max_attempts")
    assert b.state(group) == "abandoned"
    assert b.attempt(group, 1)["cancel_cause"] == "abandon"
    assert b.attempt(group, 2)["status"] == "cancelled"
    assert b.fail(group, 1, "cancelled").close == "abandoned"
    assert b.close(group, "abandoned").applied


def test_s20_stale_is_no_failure_and_has_its_own_bound(make: Make) -> None:
    b = make(groups={"size": 4, "max_attempts": 3, "max_stale": 5})
    group = b.group()
    causes = ["infra_error", "stale", "stale", "infra_error"]
    for attempt, cause in enumerate(causes):
        assert b.fail(group, 0, cause, attempt=attempt).next_attempt == attempt + 1
    for attempt in range(4, 6):
        assert b.fail(group, 0, "stale", attempt=attempt).next_attempt == attempt + 1
    answer = b.fail(group, 0, "stale", attempt=6)
    assert (answer.close, answer.cause) == ("expired", "max_stale")
    assert b.state(group) == "expired"


def test_s20c_losses_are_no_failures_and_have_a_bound_of_the_group(make: Make) -> None:
    b = make(groups={"size": 4, "max_attempts": 2, "max_losses": 6})
    group = b.group()
    for attempt in range(5):
        b.start(group, 0, attempt)
        assert b.fail(group, 0, attempt=attempt, lost=True).next_attempt == attempt + 1
        assert b.fail(group, 0, attempt=attempt, lost=True).next_attempt == attempt + 1
    row = b.attempt(group, 0, 4)
    assert (row["state"], row["status"], row["counts_as_failure"]) == ("lost", "infra_error", False)
    losses = b.one("SELECT losses FROM groups WHERE run_id = %s AND group_id = %s", b.run, group)
    assert losses["losses"] == 5
    b.start(group, 1)
    answer = b.fail(group, 1, lost=True)
    assert (answer.close, answer.cause) == ("abandoned", "max_losses")


def test_s20d_a_spare_that_can_still_fill_the_group_ends_the_sample(make: Make) -> None:
    b = make(groups={"size": 4, "oversample": 1})
    group = b.group()
    answers = [b.fail(group, 0) for _ in range(2)]
    assert answers == [NextAttempt(give_up=True, cause="infra_error")] * 2
    row = b.attempt(group, 0)
    assert (row["counts_as_failure"], row["resubmitted_as"]) == (True, None)
    assert b.fail(group, 1).next_attempt == 1


def test_a_failure_before_a_success_is_not_counted_later(make: Make) -> None:
    b = make(groups={"size": 2, "max_attempts": 2})
    group = b.group()
    assert b.fail(group, 0).next_attempt == 1
    b.rollout(group, 0, attempt=1)
    b.sql(
        """UPDATE attempts SET member = false, resubmitted_as = 'stale'
        WHERE run_id = %s AND sample = 0 AND attempt = 1""",
        b.run,
    )
    b.sql(
        """INSERT INTO attempts(run_id, group_id, sample, attempt, gen, submitted_version)
        VALUES (%s, %s, 0, 2, 0, 0)""",
        b.run,
        group,
    )
    assert b.fail(group, 0, attempt=2).next_attempt == 3


def test_an_attempt_that_joined_before_its_worker_died_is_adopted(make: Make) -> None:
    b = make()
    group = b.group()
    ref = b.rollout(group, 0)
    answer = b.fail(group, 0, lost=True)
    assert answer.adopted == ref
    assert answer.next_attempt is None


def test_an_error_the_execution_wrote_itself_is_no_loss(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.finish(group, 0, None, status=Status.INFRA_ERROR)
    assert b.fail(group, 0, lost=True).next_attempt == 1
    row = b.attempt(group, 0)
    assert (row["state"], row["counts_as_failure"]) == ("finished", True)


@pytest.mark.parametrize(
    ("cancel", "resubmitted", "failure", "state"),
    [
        ("stale", "stale", False, "finished"),
        ("resident_limit", "cancelled", False, "finished"),
        ("human", "infra_error", False, "lost"),
        ("surplus", None, False, "finished"),
        ("close", None, False, "finished"),
        ("deadline", None, False, "finished"),
    ],
)
def test_the_ledgers_own_cancel_decides(
    make: Make, cancel: str, resubmitted: str | None, failure: bool, state: str
) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sql("UPDATE attempts SET cancel_cause = %s WHERE run_id = %s AND sample = 0", cancel, b.run)
    answer = b.fail(group, 0, "cancelled")
    assert answer.give_up is (resubmitted is None)
    row = b.attempt(group, 0)
    assert (row["resubmitted_as"], row["counts_as_failure"], row["state"]) == (
        resubmitted,
        failure,
        state,
    )
    assert row["surplus"] is (cancel == "surplus")


def test_a_workflow_whose_group_was_closed_is_told_so(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.ledger.call(cancelling.return_groups, b.run, "close")
    answer = b.fail(group, 0, lost=True)
    assert (answer.close, answer.cause) == ("cancelled", "superseded")
    row = b.attempt(group, 0)
    assert (row["status"], row["resubmitted_as"]) == ("cancelled", None)
    assert not b.close(group, "cancelled").applied


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
@pytest.mark.parametrize("max_lag", [1, 2])
def test_the_queue_row_carries_the_age_of_the_oldest_token(
    make: Make, max_lag: int, lag: int
) -> None:
    """Whether it may train is for PLAN (S9, S10, S13, S14): the row must say how old it is."""
    b = make(groups={"size": 2}, schedule={"order": "deadline", "max_lag": max_lag})
    group = b.group()
    b.start(group, 0)
    b.sampled(group, 0)
    for version in range(1, lag + 1):
        b.serve(version)
    b.sampled(group, 0, version=lag)
    b.finish(group, 0)
    b.rollout(group, 1)
    b.close(group)
    (row,) = b.queued(group)
    assert row["oldest_version"] == 0
