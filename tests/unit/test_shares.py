"""The shares of several trainer processes are the batches of one, dealt out in turn."""

import pytest

from domain.data import TaskStream
from domain.errors import DataChanged
from domain.rollouts import Task
from domain.shares import Share

TASKS = [Task(f"t{i}", {"n": i}) for i in range(10)]


@pytest.mark.parametrize("shares", [2, 3, 4])
def test_all_shares_together_draw_every_batch_once_and_in_order(shares: int) -> None:
    whole = TaskStream(tasks=TASKS, batch_size=2, epochs=2, seed=3)
    parts = [Share(whole, share, shares) for share in range(shares)]
    assert whole.batches == 10
    drawn = [part.batch(i) for i in range(-(-10 // shares)) for part in parts]
    assert drawn[:10] == [whole.batch(i) for i in range(10)]
    assert drawn[10:] == [[]] * (len(drawn) - 10)  # the later shares end one batch earlier
    assert parts[1].position(2) == whole.position(2 * shares + 1)


def test_a_share_refuses_other_data_whichever_share_the_position_is_of() -> None:
    whole = TaskStream(tasks=TASKS, batch_size=2, seed=3)
    first, second = (Share(whole, share, 2) for share in range(2))
    first.verify(second.position(4))
    with pytest.raises(DataChanged, match="seed"):
        first.verify(Share(TaskStream(tasks=TASKS, batch_size=2, seed=4), 1, 2).position(4))
