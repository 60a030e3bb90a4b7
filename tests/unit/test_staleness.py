"""The holding rule and the submit gate against the tables of the specification."""

import pytest

from domain.staleness import choose_batch, may_advance, slack, submit_gate, too_old

HOLD, ADVANCE = False, True


@pytest.mark.parametrize(
    ("name", "current", "groups", "bound", "outstanding", "advances"),
    [
        ("W1 nothing outstanding", 12, 2, 2, [], ADVANCE),
        ("W2 one fresh group", 12, 2, 2, [12], ADVANCE),
        ("W3 one group at its last version", 12, 2, 2, [10], HOLD),
        ("W4 two expire next, B=2", 12, 2, 2, [11, 11], ADVANCE),
        ("W5 three expire next, B=2", 12, 2, 2, [11, 11, 11], HOLD),
        ("W6 v10 may train at 12", 11, 1, 2, [10], ADVANCE),
        ("W7 v10 may not train at 13", 12, 1, 2, [10], HOLD),
        ("W8 one due 13, two due 14, B=1", 12, 1, 2, [11, 12, 12], HOLD),
        ("W9 one due 13, one due 14, B=1", 12, 1, 2, [11, 12], ADVANCE),
        ("W10 three v11 fit", 11, 1, 3, [11, 11, 11], ADVANCE),
        ("W11 a fourth does not", 11, 1, 3, [11, 11, 11, 11], HOLD),
        ("W12 S=0, one outstanding", 5, 4, 0, [5], HOLD),
        ("W13 S=0, none", 5, 4, 0, [], ADVANCE),
        ("W14 ahead=2, S=1", 0, 2, 1, [0] * 4, HOLD),
        ("W15 ahead=2, S=2", 0, 2, 2, [0] * 4, ADVANCE),
        ("W16 sync_every=2, ahead=1", 7, 2, 2, [6, 6], ADVANCE),
        ("W17 sync_every=2, ahead=2", 7, 2, 2, [6] * 4, HOLD),
        ("W18 mixed ages", 20, 4, 3, [18] * 4 + [19] * 4 + [20] * 4, ADVANCE),
        ("W19 one more at the tightest", 20, 4, 3, [18] * 5 + [19] * 4 + [20] * 3, HOLD),
        ("W20 overflow at the middle deadline", 20, 4, 3, [18] * 4 + [19] * 5, HOLD),
    ],
)
def test_wait_holds_exactly_when_the_table_says(
    name: str, current: int, groups: int, bound: int, outstanding: list[int], advances: bool
) -> None:
    assert may_advance(current, groups, bound, outstanding) is advances, name


def test_slack_of_nothing_is_the_whole_window() -> None:
    assert slack(12, 2, 3, []) == 6


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
