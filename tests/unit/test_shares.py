"""The shares of several trainer processes are the batches of one, dealt out in turn."""

import pytest

from domain.data import TaskStream
from domain.errors import DataChanged
from domain.rollouts import Task
from domain.shares import Division, Share

TASKS = [Task(f"t{i}", {"n": i}) for i in range(10)]


@pytest.mark.parametrize("shares", [2, 3, 4])
def test_all_shares_together_draw_every_batch_once_and_in_order(shares: int) -> None:
    whole = TaskStream(tasks=TASKS, batch_size=2, epochs=2, seed=3)
    parts = [Share(whole, share, Division(shares)) for share in range(shares)]
    assert whole.batches == 10
    drawn = [part.batch(i) for i in range(-(-10 // shares)) for part in parts]
    assert drawn[:10] == [whole.batch(i) for i in range(10)]
    assert drawn[10:] == [[]] * (len(drawn) - 10)  # the later shares end one batch earlier
    assert parts[1].position(2) == whole.position(2 * shares + 1)


def test_a_share_refuses_other_data_whichever_share_the_position_is_of() -> None:
    whole = TaskStream(tasks=TASKS, batch_size=2, seed=3)
    first, second = (Share(whole, share, Division(2)) for share in range(2))
    first.verify(second.position(4))
    other = TaskStream(tasks=TASKS, batch_size=2, seed=4)
    with pytest.raises(DataChanged, match="seed"):
        first.verify(Share(other, 1, Division(2)).position(4))


@pytest.mark.parametrize("division", [Division(1), Division(3), Division(2, 5, 15)])
def test_a_share_finds_its_first_batch_at_or_after_a_place(division: Division) -> None:
    for share in range(division.shares):
        for whole in range(division.whole, division.whole + 9):
            first = division.first(share, whole)
            assert division.place(share, first) >= whole
            assert first == division.batch or division.place(share, first - 1) < whole


def test_a_division_in_data_order_goes_on_where_the_one_before_it_stands() -> None:
    third = Division(2).among(3, step=4, ordered=True).among(1, step=6, ordered=True)
    assert third == Division(1, 6, 2 * 4 + 3 * 2)
    assert Division.of({"division": third.origin()}, 1) == third
    assert Division.of({}, 2) == Division(2) == Division(5).among(2, step=4, ordered=False)
