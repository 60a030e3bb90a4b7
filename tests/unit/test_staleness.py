"""The holding rule and the submit gate against the tables of the specification."""

import pytest

from domain.planning import Hold, Ready, Running, Step, plan
from domain.staleness import binding, choose_batch, may_advance, slack, submit_gate, too_old
from tests.wait_vectors import VECTORS, Vector

W = pytest.mark.parametrize("w", VECTORS, ids=lambda w: w.name)


@W
def test_wait_holds_exactly_when_the_table_says(w: Vector) -> None:
    assert may_advance(w.current, w.groups, w.bound, w.outstanding) is (not w.holds)
    assert slack(w.current, w.groups, w.bound, w.outstanding) == w.slack
    tightest = binding(w.current, w.groups, w.bound, w.outstanding)
    assert tightest == (None if w.deadline is None else (w.deadline, w.slack))


@pytest.mark.parametrize("still", ["sampled", "complete"])
@W
def test_plan_holds_with_the_table_and_names_every_group_that_is_due(w: Vector, still: str) -> None:
    """The vector's groups are what is left beside the B that would train."""
    youngest = w.current if still == "sampled" else min(w.outstanding, default=w.current)
    rows = [Ready(g, 0, g, youngest, (8,)) for g in range(w.groups)]
    left = list(enumerate(w.outstanding, w.groups))
    if still == "complete":
        rows += [Ready(g, 0, g, version, (8,)) for g, version in left]
        left = []
    decision = plan(
        "deadline",
        rows,
        [Running(g, version) for g, version in left],
        current=w.current,
        groups_per_step=w.groups,
        bound=w.bound,
        hold=True,
        draining=False,
        overflow="accumulate",
        rows=1,
        width=8,
        admit=w.groups,
    )
    if not w.holds:
        assert isinstance(decision, Step)
        assert [row.group for row in decision.take] == [*range(w.groups)]
        return
    assert isinstance(decision, Hold)
    assert (decision.binding_deadline, decision.slack) == (w.deadline, w.slack)
    assert sorted(decision.binding_groups) == [
        g for g, v in enumerate(w.outstanding, w.groups) if v + w.bound <= (w.deadline or 0)
    ]


def test_slack_of_nothing_is_the_whole_window() -> None:
    assert slack(12, 2, 3, []) == 6


def test_a_deadline_that_has_passed_leaves_no_place_and_takes_none_from_later_ones() -> None:
    assert slack(12, 2, 2, [8]) == -1
    assert binding(12, 2, 2, [8, 12]) == (10, -1)


@pytest.mark.parametrize(
    ("current", "groups", "bound", "outstanding", "served", "wanted", "allowed"),
    [
        (0, 2, 1, [], 0, 4, 4),
        (0, 2, 1, [0, 0], 0, 2, 2),
        (0, 2, 0, [], 0, 4, 2),
        (5, 4, 1, [4] * 4, 5, 4, 4),
        (5, 4, 1, [5] * 4, 4, 4, 4),
        (5, 4, 1, [4] * 4, 4, 4, 0),
        (7, 2, 2, [5, 5], 7, 6, 4),
        (7, 2, 2, [6, 6, 6], 7, 4, 3),
        (3, 2, 1, [3, 3], 2, 2, 2),
        (3, 2, 1, [2, 3], 2, 2, 1),
    ],
)
def test_submit_gate_follows_the_table(
    current: int,
    groups: int,
    bound: int,
    outstanding: list[int],
    served: int,
    wanted: int,
    allowed: int,
) -> None:
    assert submit_gate(current, groups, bound, outstanding, served, wanted) == allowed


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_staleness_bound_is_not_off_by_one(bound: int, lag: int) -> None:
    assert too_old(10, 10 + lag, bound) is (lag > bound)


def test_version_newer_than_the_trainer_is_a_protocol_error() -> None:
    with pytest.raises(ValueError, match="newer than the trainer"):
        too_old(13, 12, 2)


def test_choose_batch_takes_the_earliest_deadlines() -> None:
    assert choose_batch({5: 3, 7: 2, 6: 2}, {}, 3, 2, 2) == [6, 7]


def test_choose_batch_waits_for_more_groups_unless_draining() -> None:
    assert choose_batch({5: 3}, {}, 3, 2, 2) is None
    assert choose_batch({5: 3}, {}, 3, 2, 2, draining=True) == [5]
    assert choose_batch({5: 3}, {6: 3}, 3, 2, 2, draining=True) is None


def test_choose_batch_holds_for_a_group_that_would_expire() -> None:
    assert choose_batch({5: 3, 6: 3}, {7: 1}, 3, 2, 2) is None
