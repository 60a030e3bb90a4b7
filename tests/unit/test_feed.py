"""The batches of a loop of one's own: read ahead, handed out in order, compared."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from domain.errors import ConfigError, DataChanged, SourceBroken
from domain.rollouts import Task
from trainer.feed import Feed


def to_tasks(batch: list[int]) -> list[Task]:
    return [Task(str(n)) for n in batch]


def ids(feed: Feed, number: int) -> list[str] | None:
    tasks = feed.batch(number)
    return None if tasks is None else [task.id for task in tasks]


def test_it_reads_so_many_batches_ahead_and_no_further() -> None:
    read: list[int] = []

    def data() -> Iterator[list[int]]:
        for n in range(5):
            read.append(n)
            yield [n]

    feed = Feed(to_tasks, ahead=2)
    handed = feed.read(data())
    assert read == []
    assert next(handed) == [0]
    assert read == [0, 1, 2]
    assert (ids(feed, 2), ids(feed, 3)) == (["2"], None)
    feed.drop(1)
    assert ids(feed, 0) is None
    assert list(handed) == [[1], [2], [3], [4]]
    assert (feed.ended_at, ids(feed, 5), ids(feed, 9)) == (5, [], [])


def test_it_starts_where_the_loop_stands() -> None:
    feed = Feed(to_tasks, ahead=1)
    feed.start(2)
    assert list(feed.read([[0], [1], [2], [3]])) == [[2], [3]]
    feed.start(4)
    assert list(feed.read([[0], [1], [2], [3]])) == []
    feed.start(5)
    with pytest.raises(
        DataChanged, match="ends after 4 batches, but this run stands before batch 5"
    ):
        list(feed.read([[0], [1], [2], [3]]))


def test_a_second_reading_goes_on_where_the_first_was_left() -> None:
    feed = Feed(to_tasks, ahead=1)
    for batch in feed.read([[0], [1], [2]]):
        assert batch == [0]
        feed.drop(1)
        break
    assert list(feed.read([[0], [1], [2]])) == [[1], [2]]
    with pytest.raises(ConfigError, match="all epochs as one iterable"):
        list(feed.read([[0], [1], [2]]))


def test_a_batch_that_was_not_read_is_put_by_the_scheduler() -> None:
    feed = Feed(to_tasks, ahead=1)
    assert [task.id for task in feed.put(0, [7])] == ["7"]
    with pytest.raises(DataChanged, match="batch 0 gives tasks"):
        feed.put(0, [8])


@pytest.mark.parametrize("tasks", [lambda batch: [], lambda batch: ["t"]])
def test_what_gives_no_tasks_is_refused(tasks: Callable[[Any], Any]) -> None:
    with pytest.raises(SourceBroken, match=r"must turn a batch into at least one rollbook\.Task"):
        Feed(tasks, ahead=0).put(0, [1])
