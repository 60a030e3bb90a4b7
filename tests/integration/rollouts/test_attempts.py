"""The start and the end of an attempt: pins, fences, membership, what is refused."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from domain.errors import Fenced, LedgerError
from domain.rollouts import Status
from storage import attempts
from storage.pins import choose_version

Make = Callable[..., Any]


def test_start_pins_the_version_served_then_and_keeps_it(make: Make) -> None:
    b = make()
    group = b.group()
    b.serve(1)
    first = b.start(group, 0)
    assert (first.version, first.fence, first.segments) == (1, 1, 0)
    assert first.task.id == f"t{group}"
    assert first.task.data == {"n": 1}
    b.serve(2)
    b.sampled(group, 0)
    again = b.start(group, 0)
    assert (again.version, again.fence, again.segments) == (1, 2, 1)
    assert b.start(group, 1).version == 2
    assert b.attempt(group, 0)["submitted_version"] == 0


def test_a_start_without_a_served_version_is_refused(make: Make) -> None:
    b = make()
    group = b.group()
    b.sql("UPDATE policy_versions SET state = 'draining' WHERE run_id = %s", b.run)
    with pytest.raises(LedgerError, match="serves no version"):
        b.start(group, 0)


def test_an_attempt_cancelled_before_it_starts_ends_there(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    ended = b.start(group, 0).ended
    assert ended is not None
    assert (ended.status, ended.resubmit, ended.surplus) == ("cancelled", "stale", False)
    assert b.attempt(group, 0)["state"] == "finished"


def test_the_first_finishers_join_and_spares_are_surplus(make: Make) -> None:
    b = make(groups={"size": 2, "oversample": 1})
    group = b.group()
    refs = [b.rollout(group, sample) for sample in (2, 0, 1)]
    assert [ref.member for ref in refs] == [True, True, False]
    assert [ref.surplus for ref in refs] == [False, False, True]
    assert refs[2].resubmit is None
    assert b.members(group) == [0, 2]
    assert b.close(group).state == "complete"


def test_a_finish_delivered_three_times_is_one_row_and_one_answer(make: Make) -> None:
    b = make()
    group = b.group()
    refs = [b.rollout(group, 0), b.finish(group, 0), b.finish(group, 0)]
    assert refs[0] == refs[1] == refs[2]
    assert b.members(group) == [0]
    assert b.start(group, 0).ended == refs[0]


def test_a_late_result_is_refused_and_counted(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sampled(group, 0)
    assert b.fail(group, 0, "timeout").next_attempt == 1
    with pytest.raises(Fenced, match="ended as cancelled"):
        b.finish(group, 0)
    b.ledger.call(attempts.late_result, b.key(group, 0), 1, "finish")
    b.rollout(group, 0, attempt=1)
    assert b.attempt(group, 0)["member"] is False
    assert b.attempt(group, 0, 1)["member"] is True
    late = b.one(
        "SELECT count(*) AS n FROM events WHERE run_id = %s AND kind = 'late_result'", b.run
    )
    assert late["n"] == 1


def test_an_older_execution_is_fenced_everywhere(make: Make) -> None:
    b = make()
    group = b.group()
    old = b.start(group, 0).fence
    b.start(group, 0)
    with pytest.raises(Fenced):
        b.finish(group, 0, fence=old)
    assert b.attempt(group, 0)["state"] == "running"


def test_an_execution_that_was_given_up_cannot_start_any_more(make: Make) -> None:
    b = make()
    group = b.group()

    def start(second: int) -> attempts.Started:
        started: attempts.Started = b.ledger.call(
            attempts.start,
            b.key(group, 0),
            worker=f"w{second}",
            scheduled_at=datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC),
        )
        return started

    start(1)
    successor = start(2)
    assert start(2).fence == successor.fence + 1  # told again
    with pytest.raises(Fenced, match="later execution"):
        start(1)
    assert b.attempt(group, 0)["worker"] == "w2"
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    with pytest.raises(Fenced, match="later execution"):
        start(1)
    assert b.attempt(group, 0)["state"] == "running"  # its own execution will end it


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(make: Make, reward: float) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sampled(group, 0)
    with pytest.raises(ValueError, match="no verdict"):
        b.finish(group, 0, reward)
    with pytest.raises(ValueError, match="must have a reward"):
        b.finish(group, 0, None)
    assert b.members(group) == []


def test_truncated_without_a_verdict_is_unscored_under_score_and_joins_under_mask(
    make: Make,
) -> None:
    cut = {"reward": None, "status": Status.TRUNCATED, "cause": "tokens"}
    b = make(trainer={"truncation": "score"})
    group = b.group()
    ref = b.rollout(group, 0, **cut)
    assert (ref.member, ref.resubmit, ref.surplus) == (False, "unscored", False)
    following = b.fail(group, 0, "unscored", status="truncated")
    assert following.next_attempt == 1
    row = b.attempt(group, 0)
    assert (row["resubmitted_as"], row["counts_as_failure"]) == ("unscored", True)

    masked = make(trainer={"truncation": "mask"})
    group = masked.group()
    ref = masked.rollout(group, 0, **cut)
    assert (ref.member, ref.reward, ref.cause) == (True, None, "tokens")
    assert masked.attempt(group, 0)["chain_lengths"] == []


def test_a_policy_by_cause_decides_which_truncated_rollouts_take_rows(make: Make) -> None:
    b = make(trainer={"truncation": "mask", "truncation_by_cause": {"tokens": "zero"}})
    group = b.group()
    b.rollout(group, 0, reward=None, status=Status.TRUNCATED, cause="tokens")
    b.rollout(group, 1, reward=None, status=Status.TRUNCATED, cause="turns")
    assert b.attempt(group, 0)["chain_lengths"] == [5]
    assert b.attempt(group, 1)["chain_lengths"] == []


def test_a_rollout_that_was_cancelled_as_stale_cannot_join(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sampled(group, 0)
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    ref = b.finish(group, 0)
    assert (ref.member, ref.surplus, ref.resubmit) == (False, False, "stale")
    assert b.fail(group, 0, "stale").next_attempt == 1
    row = b.attempt(group, 0)
    assert (row["resubmitted_as"], row["counts_as_failure"]) == ("stale", False)


def test_components_and_metrics_are_kept(make: Make) -> None:
    b = make()
    group = b.group()
    fence = b.start(group, 0).fence
    b.sampled(group, 0)
    end = attempts.Ending(
        status=Status.COMPLETED, reward=0.1 + 0.2, components={"format": 0.1}, metrics={"calls": 3}
    )
    ref = b.ledger.call(attempts.finish, b.key(group, 0), fence, end)
    assert ref.reward == 0.1 + 0.2
    row = b.attempt(group, 0)
    assert (row["reward_parts"], row["metrics"]) == ({"format": 0.1}, {"calls": 3})


def chooser(b: Any, group: int, fence: int) -> Callable[..., tuple[int, int]]:
    """Asks for the version and the KV anchor of the next request, given what engines hold."""

    def choose(*resident: int, refill: bool = False) -> tuple[int, int]:
        choice = b.ledger.call(
            choose_version,
            b.key(group, 0),
            fence,
            max_staleness=1,
            refill=refill,
            resident=resident,
        )
        return choice.version, choice.anchor

    return choose


def by_segments(make: Make) -> Any:
    return make(
        sampling={"policy": "segment", "kv_cache": {"max_staleness": 1}},
        schedule={"order": "deadline", "stale_policy": "resubmit", "max_lag": 4},
    )


def test_under_the_segment_policy_the_kv_bound_chooses_the_version(make: Make) -> None:
    b = by_segments(make)
    group = b.group()
    choose = chooser(b, group, b.start(group, 0).fence)
    assert choose(0) == (0, 0)
    b.serve(1)
    assert choose(0, 1, refill=True) == (1, 0)  # within the bound nothing is computed again
    assert choose(0, 1) == (1, 0)  # extends the old prefix with new weights
    b.serve(2)
    assert choose(0, 1, 2) == (1, 0)  # hold: stays at a compatible version
    assert choose(0, 2) == (0, 0)
    assert choose(2) == (2, 2)  # the prefix is lost: rebuilt, a new anchor
    b.serve(4)
    assert choose(2, 4, refill=True) == (4, 4)
    pins = b.one("SELECT sum(pins) AS n FROM version_pins WHERE run_id = %s AND version = 4", b.run)
    assert pins["n"] == 1
    b.start(group, 0)
    with pytest.raises(Fenced):
        choose(4)


def test_a_hold_goes_to_no_version_older_than_its_kv_or_on_its_way_out(make: Make) -> None:
    b = by_segments(make)
    b.serve(1)
    b.serve(2)
    group = b.group()
    choose = chooser(b, group, b.start(group, 0).fence)
    assert choose(1, 2) == (2, 2)
    b.serve(3)
    b.serve(4)
    b.sql("UPDATE policy_versions SET state = 'draining' WHERE run_id = %s AND version = 3", b.run)
    assert choose(1, 2, 3, 4) == (2, 2)
    assert choose(1, 3, 4) == (4, 4)
