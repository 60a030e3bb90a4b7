"""Cutting the long tail on the ledger: spares, admitted groups, surplus, and the bias it has.

Rollouts, their workflows and the trainer are played by the product's own transactions.
"""

from typing import Any

import pytest

from domain.rollouts import Status
from storage import attempts, records, segments
from storage.attempts import Ending
from storage.database import Ledger
from storage.plans import Planned, Waiting
from tests.rehearsal import configuration
from tests.staged import Staged
from trainer.batch import Batch


def staged(ledger: Ledger, batch_size: int = 1, **sections: Any) -> Staged:
    groups = {"size": 2} | sections.pop("groups", {})
    run = Staged(
        ledger,
        configuration(tasks={"batch_size": batch_size}, groups=groups, **sections),
    )
    run.begin()
    run.hand_over_and_deliver()
    return run


def planned(run: Staged) -> Planned:
    plan = run.plan()
    assert isinstance(plan, Planned), plan
    return plan


def figures(run: Staged, plan: Planned) -> dict[str, float]:
    """What the step's record tells of its rollouts."""
    rows = [(row.group, row.part) for row in plan.rows]
    batch = Batch(
        groups=run.ledger.call(segments.members, run.run, rows),
        cancelled_tokens=run.ledger.call(records.cancelled_tokens, run.run, plan.step),
    )
    packed = batch.pack(run.config, plan.version_before)
    return batch.figures(run.config, packed, plan.version_before)


def surplus(run: Staged) -> list[tuple[int, int]]:
    """Group and sample of what was cancelled as surplus; none of it may count as a failure."""
    rows = run.rows(
        "SELECT group_id, sample, counts_as_failure, resubmitted_as, member FROM attempts "
        "WHERE run_id = %s AND (surplus OR cancel_cause = 'surplus') ORDER BY 1, 2",
        run.run,
    )
    assert not any(r["counts_as_failure"] or r["resubmitted_as"] or r["member"] for r in rows)
    return [(row["group_id"], row["sample"]) for row in rows]


def test_the_first_to_finish_are_the_group_and_the_spares_are_stopped(ledger: Ledger) -> None:
    run = staged(ledger, groups={"size": 4, "oversample": 2})
    for sample in range(6):
        run.begin_rollout(0, sample, segments=1 + 3 * (sample in (1, 4)))
    for sample in (5, 0, 3, 2):
        run.end_rollout(0, sample)
    assert run.states()[0] == "queue"
    assert surplus(run) == [(0, 1), (0, 4)]
    assert run.value("SELECT members FROM queue WHERE run_id = %s", run.run) == 4
    assert run.ledger.call(records.totals, run.run)["cancelled"] == 2


def test_a_spare_that_reports_after_the_group_was_full_changes_nothing(ledger: Ledger) -> None:
    run = staged(ledger, groups={"size": 2, "oversample": 1})
    late = run.begin_rollout(0, 1)
    run.roll_out(0, 0, 2)
    assert late.fence is not None
    told = run.ledger.call(
        attempts.finish, late.at, late.fence, Ending(status=Status.COMPLETED, reward=9.0)
    )
    assert (told.member, told.surplus, told.resubmit) == (False, True, None)
    assert surplus(run) == [(0, 1)]
    assert run.value("SELECT members FROM queue WHERE run_id = %s", run.run) == 2


def test_shorter_rollouts_are_preferred_and_the_record_says_by_how_much(ledger: Ledger) -> None:
    run = staged(ledger, groups={"size": 2, "oversample": 1})
    run.begin_rollout(0, 1, segments=5)
    run.roll_out(0, 0, 2)
    told = figures(run, planned(run))
    assert (told["length/admitted"], told["length/cancelled"]) == (3, 15)


def test_the_bias_of_whole_groups_is_told_too(ledger: Ledger) -> None:
    run = staged(ledger, 2, groups={"admit": 1})
    run.begin_rollout(0, 0, segments=4)
    run.roll_out(1, 0, 1)
    told = figures(run, planned(run))
    # the long rollout, and its sibling that had not begun
    assert (told["length/admitted"], told["length/cancelled"]) == (3, 6)


def test_the_first_groups_to_complete_are_admitted_and_the_last_is_surplus(ledger: Ledger) -> None:
    run = staged(ledger, 4, groups={"admit": 3})
    running = run.begin_rollout(1, 0)
    for group in (3, 0):
        run.roll_out(group, 0, 1)
    assert isinstance(run.plan(), Waiting)
    run.roll_out(2, 0, 1)
    assert [row.group for row in planned(run).rows] == [0, 2, 3]
    assert run.states()[1] == "cancelled"
    assert run.group(1)["closed_cause"] == "surplus"
    assert surplus(run) == [(1, 0), (1, 1)]
    run.cluster.relay()
    assert running.cause is None or running.cause == "surplus"
    assert not run.rows(
        "SELECT 1 FROM attempts WHERE run_id = %s AND group_id = 1 AND cancel_cause IS NULL",
        run.run,
    )


def test_a_group_that_does_not_fit_does_not_count_towards_those_admitted(ledger: Ledger) -> None:
    run = staged(
        ledger,
        4,
        groups={"size": 1, "admit": 3},
        trainer={"overflow": "cut", "rows": 1, "width": 32, "estimator": "mean"},
        budget={"max_generated_tokens": 30, "segment_tokens": 30, "max_context_tokens": 32},
    )
    for group in (3, 0):
        run.roll_out(group, 0, segments=2)
    run.roll_out(2, 0, segments=5)
    assert isinstance(run.plan(), Waiting)
    run.roll_out(1, 0, segments=2)
    assert [row.group for row in planned(run).rows] == [0, 1, 3]
    assert run.states()[2] == "cut"
    assert run.value("SELECT cause FROM queue WHERE group_id = 2") == "rows: needs 1 of 1"


@pytest.mark.parametrize(
    ("order", "trained"), [("dataset", [2, 3]), ("deadline", [3, 2]), ("admission", [4, 3])]
)
def test_each_order_takes_groups_by_its_own_rule(
    ledger: Ledger, order: str, trained: list[int]
) -> None:
    """Two groups a step. Groups 2 to 5 complete in the order 4, 3, 2, 5; 3 began a version earlier."""
    run = staged(
        ledger,
        2,
        groups={"size": 1},
        trainer={"estimator": "mean"},
        schedule={"order": order, "ahead": 1, "max_lag": 3},
    )
    run.begin_rollout(3, 0)
    run.roll_out(0, 0)
    run.roll_out(1, 0)
    assert [row.group for row in planned(run).rows] == [0, 1]
    run.serve(run.apply())
    run.hand_over_and_deliver()
    run.roll_out(4, 0)
    run.end_rollout(3, 0)
    run.roll_out(2, 0)
    run.roll_out(5, 0)
    assert [row.group for row in planned(run).rows] == trained
