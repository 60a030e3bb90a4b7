"""Re-opening: good members stay, only the missing samples run, and bounds end it."""

from typing import Any

from storage import reopen
from storage.database import Ledger
from storage.plans import Waiting
from tests.rehearsal import Rehearsal, configuration


def two_versions_on(ledger: Ledger, **groups: Any) -> Rehearsal:
    """c = 2, S = 1: group 3 is complete, with members of versions 0, 1 and 2."""
    config = configuration(groups={"size": 3} | groups, schedule={"order": "deadline"})
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    for first, second in ((0, 1), (2, 4)):
        run.complete(first)
        run.complete(second)
        run.planned()
        run.serve(run.apply())
        run.hand_over()
    run.start(3)
    for sample, version in enumerate((0, 1, 2)):
        run.end(3, sample, version=version)
    run.admit(3)
    return run


def test_a_stale_member_is_sent_back_and_the_others_are_kept(ledger: Ledger) -> None:
    """S15 and S16; that the step must wait does not undo it."""
    run = two_versions_on(ledger)
    assert isinstance(run.plan(), Waiting)
    group = run.group(3)
    assert (group["state"], group["gen"], group["submitted_version"]) == ("submitted", 1, 2)
    rows = run.rows(
        "SELECT sample, attempt, state, member, resubmitted_as::text, counts_as_failure, "
        "submitted_version FROM attempts WHERE group_id = 3 ORDER BY 1, 2"
    )
    assert [tuple(row.values()) for row in rows] == [
        (0, 0, "finished", False, "stale", False, 0),
        (0, 1, "submitted", False, None, False, 2),
        (1, 0, "finished", True, None, False, 0),
        (2, 0, "finished", True, None, False, 0),
    ]
    start = run.commands("start_group")[-1]
    assert start["key"] == "run/r1/b000001/g3~1"
    assert (start["payload"]["kept"], start["payload"]["samples"]) == (2, [[0, 1]])
    assert start["payload"]["submitted_version"] == 2
    withdrawn = run.rows("SELECT gen, state, cause FROM queue WHERE group_id = 3")
    assert withdrawn == [{"gen": 0, "state": "expired", "cause": "stale_member"}]
    run.complete(3)
    run.complete(5)
    plan = run.planned()
    assert plan == [3, 5]
    lag = run.value("SELECT lag FROM queue WHERE group_id = 3 AND state = 'planned'")
    assert lag == 1


def test_the_oldest_legal_member_is_not_stale(ledger: Ledger) -> None:
    run = two_versions_on(ledger)
    run.plan()
    run.complete(3)
    run.plan()
    assert run.group(3)["gen"] == 1  # its oldest member has lag 1


def test_too_many_stale_attempts_of_a_sample_expire_the_group(ledger: Ledger) -> None:
    run = two_versions_on(ledger, max_stale=1)
    run.plan()
    group = run.group(3)
    assert (group["state"], group["closed_cause"]) == ("expired", "max_stale")
    assert run.states()[3] == "expired"
    assert (
        run.value("SELECT count(*) FROM attempts WHERE group_id = 3 AND state = 'submitted'") == 0
    )


def test_a_lost_workflow_costs_what_ran_and_counts_no_failure(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(groups={"size": 3, "oversample": 1})).begin()
    run.hand_over()
    run.start(0, sample=0)
    run.end(0, 0)
    run.start(0, sample=1)
    run.start(0, sample=2)
    assert ledger.call(reopen.reopen, "r1", 0, 0, cause="lost")
    assert not ledger.call(reopen.reopen, "r1", 0, 0, cause="lost")
    rows = run.rows(
        "SELECT sample, attempt, state, status::text, resubmitted_as::text, counts_as_failure "
        "FROM attempts WHERE group_id = 0 ORDER BY 1, 2"
    )
    assert [tuple(row.values()) for row in rows] == [
        (0, 0, "finished", "completed", None, False),
        (1, 0, "lost", "infra_error", "infra_error", False),
        (1, 1, "submitted", None, None, False),
        (2, 0, "lost", "infra_error", "infra_error", False),
        (2, 1, "submitted", None, None, False),
        (3, 0, "finished", "cancelled", None, False),  # a spare that never started
    ]
    assert (run.group(0)["losses"], run.group(0)["gen"]) == (2, 1)


def test_too_many_losses_abandon_the_group(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(groups={"max_losses": 2})).begin()
    run.hand_over()
    run.start(0)
    assert ledger.call(reopen.reopen, "r1", 0, 0, cause="lost")
    group = run.group(0)
    assert (group["state"], group["closed_cause"], group["losses"]) == (
        "abandoned",
        "max_losses",
        2,
    )


def test_after_the_deadline_a_lost_group_completes_with_who_is_there(ledger: Ledger) -> None:
    for mode, part in (("discard", 0), ("carry_over", 1)):
        config = configuration(
            name=f"r-{mode}",
            groups={
                "size": 3,
                "completion": {
                    "mode": "deadline",
                    "min_members": 1,
                    "max_straggler_tokens": 8,
                    "on_stragglers": mode,
                },
            },
            schedule={
                "order": "deadline",
                "stale_policy": "mask_span",
                "allow_trajectory_loss": True,
            },
            trainer={"estimator": "batch"},
        )
        run = Rehearsal(ledger, config).begin()
        run.hand_over()
        run.start(0)
        run.end(0, 0)
        run.do(
            "UPDATE groups SET quorum_at = now(), deadline_reached_at = now() "
            "WHERE group_id = 0 AND run_id = %s",
            run.run,
        )
        if mode == "carry_over":
            run.admit_part(0, 0)
            run.end(0, 1)
        assert ledger.call(reopen.reopen, run.run, 0, 0, cause="lost")
        assert run.group(0)["state"] == "complete"
        parts = run.rows("SELECT part, members FROM queue WHERE run_id = %s ORDER BY part", run.run)
        assert parts == [{"part": p, "members": 1} for p in range(part + 1)]


def test_a_planned_group_is_not_opened_again(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    assert not ledger.call(reopen.reopen, "r1", 0, 0, cause="stale")
    assert run.states()[0] == "queue"


def test_an_outdated_generation_changes_nothing(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    for gen in (1, 7):
        assert not ledger.call(reopen.reopen, "r1", 0, gen, cause="lost")
    assert not ledger.call(reopen.reopen, "r1", 99, 0, cause="lost")
    assert run.group(0)["gen"] == 0
