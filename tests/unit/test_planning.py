"""PLAN against the vectors P1-P22."""

from dataclasses import replace
from typing import Any

import pytest

from domain.planning import Cut, End, Hold, Ready, Running, Step, Wait, plan


def ready(*rows: tuple[int, int, int, list[int]]) -> list[Ready]:
    """(group, seq, version, lengths); the group's number is its position in the batch."""
    return [Ready(g, 0, seq, v, tuple(lengths), pos=g) for g, seq, v, lengths in rows]


def done(*groups: int, lengths: list[int] | None = None) -> list[Ready]:
    return ready(*((g, seq, 0, lengths or [8]) for seq, g in enumerate(groups)))


def running(*groups: int, version: int = 0) -> list[Running]:
    return [Running(g, version) for g in groups]


DATASET: dict[str, Any] = {
    "order": "dataset",
    "current": 0,
    "groups_per_step": 4,
    "bound": 1,
    "hold": False,
    "draining": False,
    "overflow": "accumulate",
    "rows": 100,
    "width": 8,
    "admit": 4,
}
DEADLINE = DATASET | {"order": "deadline", "groups_per_step": 2, "bound": 2, "current": 3}
CUT = DATASET | {"overflow": "cut", "rows": 2}


def groups(decision: object) -> list[int]:
    assert isinstance(decision, Step), decision
    return [row.group for row in decision.take]


def test_p1_a_complete_batch_is_stored_in_data_order() -> None:
    assert groups(plan(ready=done(1, 2, 0, 3), running=[], **DATASET)) == [0, 1, 2, 3]


def test_p2_waits_for_the_batch() -> None:
    assert isinstance(plan(ready=done(1, 2, 0), running=running(3), **DATASET), Wait)


def test_p3_an_abandoned_group_shortens_the_batch() -> None:
    assert groups(plan(ready=done(1, 2, 0), running=[], **DATASET)) == [0, 1, 2]


def test_p4_p5_surplus_when_admit_is_reached() -> None:
    settings = DATASET | {"admit": 2}
    decision = plan(ready=done(3, 1), running=running(0, 2), **settings)
    assert groups(decision) == [1, 3]
    assert isinstance(decision, Step)
    assert [s.group for s in decision.surplus] == [0, 2]
    decision = plan(ready=done(3, 1, 0), running=running(2), **settings)
    assert isinstance(decision, Step)
    assert [s.group for s in decision.surplus] == [0, 2]


def test_p6_p7_a_cut_group_does_not_use_up_admit() -> None:
    settings = CUT | {"admit": 2}
    rows = ready((3, 0, 0, [8, 4]), (1, 1, 0, [8]))
    waiting = plan(ready=rows, running=running(0, 2), **settings)
    assert isinstance(waiting, Wait)
    assert waiting.cut == ()
    rows += ready((0, 2, 0, [4]))
    decision = plan(ready=rows, running=running(2), **settings)
    assert groups(decision) == [0, 3]
    assert isinstance(decision, Step)
    assert [c.row.group for c in decision.cut] == [1]
    assert [s.group for s in decision.surplus] == [2]


def test_p8_first_to_complete_keeps_its_place() -> None:
    decision = plan(ready=ready((1, 0, 0, [5, 5]), (0, 1, 0, [8, 8])), running=[], **CUT)
    assert groups(decision) == [1]
    assert isinstance(decision, Step)
    assert [(c.row.group, c.cause) for c in decision.cut] == [(0, "rows")]


def test_the_last_group_to_complete_is_cut_whole_where_rows_run_out() -> None:
    decision = plan(
        ready=ready((0, 2, 0, [64]), (1, 0, 0, [40]), (2, 1, 0, [30])),
        running=[],
        **CUT | {"width": 64},
    )
    assert groups(decision) == [1, 2]
    assert isinstance(decision, Step)
    assert [(c.row.group, c.cause, c.rows_needed) for c in decision.cut] == [(0, "rows", 1)]


def test_a_hundred_groups_that_do_not_fit_hold_no_place() -> None:
    rows = ready((0, 0, 0, [8, 8]), *((g, g, 0, [8] * (1 + g % 4)) for g in range(1, 101)))
    decision = plan(ready=rows, running=[], **CUT | {"admit": 101})
    assert groups(decision) == [0]
    assert isinstance(decision, Step)
    assert [c.row.group for c in decision.cut] == list(range(1, 101))
    assert {c.rows_needed for c in decision.cut} == {1, 2, 3, 4}


def test_p9_p10_a_batch_without_trainable_groups_is_an_empty_step() -> None:
    assert groups(plan(ready=[], running=[], **DATASET)) == []
    decision = plan(ready=ready((0, 0, 0, [8, 8, 8])), running=[], **CUT)
    assert isinstance(decision, Step)
    assert decision.take == ()
    assert decision.cut[0].rows_needed == 3


def test_p11_a_batch_beyond_the_data_ends_the_run() -> None:
    assert isinstance(plan(ready=[], running=[], **DATASET, exists=False), End)


def test_p12_the_earliest_deadlines_train_first() -> None:
    rows = ready((5, 0, 3, [8]), (6, 1, 2, [8]), (7, 2, 2, [8]))
    assert groups(plan(ready=rows, running=[], **DEADLINE)) == [6, 7]


@pytest.mark.parametrize(
    ("name", "complete", "still", "draining", "kind"),
    [
        ("P13", [5], [6], True, Wait),
        ("P14", [5], [], True, Step),
        ("P15", [5], [], False, Wait),
        ("P16", [], [], True, End),
    ],
)
def test_p13_to_p16_the_end_of_the_data(
    name: str, complete: list[int], still: list[int], draining: bool, kind: type
) -> None:
    rows = ready(*((g, g, 3, [8]) for g in complete))
    settings = DEADLINE | {"draining": draining}
    assert isinstance(plan(ready=rows, running=running(*still, version=3), **settings), kind), name


@pytest.mark.parametrize("draining", [False, True])
def test_p17_p18_wait_holds_for_the_group_that_would_expire(draining: bool) -> None:
    rows = ready((5, 0, 3, [8]), (6, 1, 3, [8]))
    settings = DEADLINE | {"hold": True, "draining": draining}
    decision = plan(ready=rows, running=running(7, version=1), **settings)
    assert isinstance(decision, Hold)
    assert (decision.binding_deadline, decision.slack, decision.binding_groups) == (3, -1, (7,))


def test_p19_the_oldest_group_trains_before_it_expires() -> None:
    rows = ready((5, 0, 3, [8]), (6, 1, 3, [8]), (7, 2, 1, [8]))
    assert groups(plan(ready=rows, running=[], **(DEADLINE | {"hold": True}))) == [7, 5]


def test_p20_admission_order_is_completion_order() -> None:
    rows = ready((6, 2, 0, [8]), (7, 3, 0, [8]), (5, 9, 0, [8]))
    settings = DEADLINE | {"order": "admission"}
    assert groups(plan(ready=rows, running=running(8), **settings)) == [6, 7]


def test_p21_a_part_counts_as_a_group() -> None:
    tail = replace(ready((5, 4, 0, [8]))[0], part=1)
    rows = [*ready((5, 2, 0, [8]), (6, 3, 0, [8])), tail]
    decision = plan(ready=rows, running=[], **(DEADLINE | {"order": "admission"}))
    assert isinstance(decision, Step)
    assert [(r.group, r.part) for r in decision.take] == [(5, 0), (6, 0)]


def test_p22_accumulate_never_cuts() -> None:
    settings = DATASET | {"rows": 2}
    assert groups(plan(ready=done(0, lengths=[8] * 9), running=[], **settings)) == [0]


def test_zero_variance_groups_are_cut_even_while_the_step_waits() -> None:
    flat = replace(ready((5, 0, 3, [8]))[0], zero_variance=True)
    settings = DEADLINE | {"filter_zero_variance": True}
    decision = plan(ready=[flat], running=running(6, version=3), **settings)
    assert isinstance(decision, Wait)
    assert decision.cut == (Cut(flat, "zero_variance", 1),)
