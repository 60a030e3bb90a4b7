"""The batches of a loop of one's own, as the stream of tasks that a consumer draws from.

The loop reads its data set through `Feed.read`, which stays `ahead` batches in front of what it
hands out, so that their rollouts can begin. Nothing else is read, and the position that counts is
the loop's: a resumed loop reads the same batches again, and what the ledger recorded of them must
match.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from domain.errors import ConfigError, DataChanged, SourceBroken
from domain.rollouts import Task


class Feed:
    """The tasks of the batches that have been read and not trained. Thread-safe."""

    def __init__(self, tasks: Callable[[Any], Sequence[Task]], *, ahead: int) -> None:
        """Nothing has been read.

        Args:
            tasks: the tasks of a batch.
            ahead: batches read in front of the one handed out.
        """
        self._tasks_of = tasks
        self._ahead = ahead
        self._lock = threading.Lock()
        self._known: dict[int, list[Task]] = {}
        self._end: int | None = None
        self._first = 0
        self._exhausted = False

    @property
    def ended_at(self) -> int | None:
        """How many batches the data has, once its end was read."""
        return self._end

    def start(self, number: int) -> None:
        """Forget what was read: the loop stands before batch `number`."""
        with self._lock:
            self._known.clear()
            self._end, self._first, self._exhausted = None, number, False

    def read(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """The batches of a data set from the loop's position on.

        Raises:
            DataChanged: the data ends before that position.
            ConfigError: an earlier reading came to the end of the data, where a run ends.
        """
        if self._exhausted:
            raise ConfigError(
                "the data of this run was read to its end; give all epochs as one iterable, such "
                "as (batch for epoch in range(3) for batch in dataset)"
            )
        source = iter(dataset)
        number = self._first
        for skipped in range(number):
            try:
                next(source)
            except StopIteration:
                raise DataChanged(
                    f"the data ends after {skipped} batches, but this run stands before batch "
                    f"{number}; restore the data set, or start a new run"
                ) from None
        window: deque[Any] = deque()
        while True:
            while self._end is None and len(window) <= self._ahead:
                try:
                    batch = next(source)
                except StopIteration:
                    self._end = number + len(window)
                else:
                    self.put(number + len(window), batch)
                    window.append(batch)
            if not window:
                self._exhausted = True
                return
            yield window.popleft()
            number += 1

    def put(self, number: int, batch: object) -> list[Task]:
        """Note a batch; returns its tasks.

        Raises:
            DataChanged: it has other tasks than when it was read ahead.
            SourceBroken: it gives no tasks, or what are none.
        """
        tasks: list[Any] = list(self._tasks_of(batch))
        wrong = [task for task in tasks if not isinstance(task, Task)]
        if wrong or not tasks:
            raise SourceBroken(
                f"batch {number} gives {wrong[0] if wrong else 'no tasks'!r}; the scheduler's "
                "`tasks` must turn a batch into at least one rollbook.Task"
            )
        with self._lock:
            known = self._known.setdefault(number, tasks)
            if known != tasks:
                raise DataChanged(
                    f"batch {number} gives tasks {[t.id for t in tasks[:5]]}, but "
                    f"{[t.id for t in known[:5]]} when it was read ahead; hand every batch of "
                    "scheduler.tasks(...) to the scheduler, in order"
                )
        return known

    def drop(self, before: int) -> None:
        """Forget the batches below `before`: they are trained."""
        with self._lock:
            self._first = before
            for number in [n for n in self._known if n < before]:
                del self._known[number]

    def batch(self, index: int) -> list[Task] | None:
        """The tasks of a batch; none beyond the end; None while it was not read."""
        with self._lock:
            if self._end is not None and index >= self._end:
                return []
            return self._known.get(index)

    def position(self, batch: int) -> dict[str, Any]:
        """The number of the next batch is all there is to say."""
        return {"batch": batch}

    def verify(self, position: Mapping[str, Any]) -> None:
        """Content is compared batch by batch, when it is registered."""
