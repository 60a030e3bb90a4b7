"""A run that waits in vain is told from one that waits: by what has not moved, and for how long."""

import pytest

from storage import outages
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration

AGO = "now() - interval '700 s'"


@pytest.fixture
def waiting(ledger: Ledger) -> Rehearsal:
    """A run whose groups were submitted long ago; everything about it is as old."""
    run = Rehearsal(ledger, configuration(groups={"timeout": 400.0})).begin()
    run.hand_over()
    run.do(f"UPDATE attempts SET submitted_at = {AGO}")
    run.do(f"UPDATE groups SET submitted_at = {AGO}")
    run.do(f"UPDATE outbox SET created_at = {AGO}")
    return run


def found(run: Rehearsal, limit_s: float = 600.0) -> str | None:
    return run.ledger.call(outages.find, run.run, limit_s=limit_s)


def test_commands_that_are_not_delivered_say_why(waiting: Rehearsal) -> None:
    assert found(waiting) == ("5 commands for Temporal are not delivered: no ledger worker leads")
    waiting.do("UPDATE outbox SET last_error = 'connection refused'")
    assert "not delivered: connection refused" in str(found(waiting))
    assert found(waiting, limit_s=900) is None


def test_each_part_that_is_away_is_named(waiting: Rehearsal) -> None:
    waiting.do(f"UPDATE outbox SET done_at = {AGO}")
    assert found(waiting) == "no workflow worker begins 4 groups"
    waiting.do("UPDATE engines SET alive_until = now()")
    assert found(waiting) == "no engine is seen; no workflow worker begins 4 groups"
    waiting.do("UPDATE engines SET alive_until = now() + interval '1 h'")
    waiting.do(f"UPDATE groups SET begun_at = {AGO}")
    assert found(waiting) == "no rollout worker takes 8 attempts"
    waiting.do(
        f"UPDATE attempts SET state = 'running', started_at = {AGO}, last_progress_at = {AGO}, "
        "pinned_version = 0, worker = 'w', engine_id = 'e', fence = 1"
    )
    assert found(waiting) == "its workflows do not go on"  # they end attempts whose time is up


def test_whatever_moves_is_no_outage(waiting: Rehearsal) -> None:
    waiting.complete(0)
    assert found(waiting) is None  # a group has just ended
    waiting.do(f"UPDATE queue SET admitted_at = {AGO}")
    waiting.do(f"UPDATE attempts SET finished_at = {AGO} WHERE finished_at IS NOT NULL")
    waiting.do(
        f"UPDATE attempts SET started_at = {AGO}, last_progress_at = {AGO} WHERE group_id = 0"
    )
    assert found(waiting) is not None
    waiting.start(1, sample=0)
    assert found(waiting) is None


def test_an_attempt_whose_time_is_not_up_may_be_silent(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(groups={"timeout": 3_600.0})).begin()
    run.hand_over()
    run.start(0, sample=0)
    run.do(f"UPDATE attempts SET submitted_at = {AGO}")
    run.do(
        f"UPDATE attempts SET last_progress_at = {AGO}, started_at = {AGO} WHERE state = 'running'"
    )
    assert found(run) is None
    run.do("UPDATE attempts SET submitted_at = now() - interval '2 h'")
    assert found(run) is not None


def test_a_run_without_rollouts_waits_for_something_else(ledger: Ledger) -> None:
    assert found(Rehearsal(ledger, configuration()).begin(), limit_s=0.001) is None
