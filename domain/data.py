"""The order in which tasks are drawn: a pure function of the data, the seed and the position.

Epochs are laid end to end and cut into batches, so that a batch may hold the end of one epoch and
the start of the next, and every task is drawn exactly once an epoch. Nothing is remembered between
calls: the only cursor is the number of the batch, which the trainer's checkpoint holds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from random import Random
from typing import Any

from domain.errors import ConfigError, DataChanged
from domain.ids import fold
from domain.rollouts import Task
from domain.text import not_json


@dataclass(frozen=True, kw_only=True)
class TaskStream:
    """All batches of a run. Two streams with the same fields hand out the same tasks for ever.

    Example: 10 tasks, `epochs=2`, `batch_size=4`: five batches, 20 draws; batch 2 holds the last
    two tasks of epoch 0 and the first two of epoch 1.
    """

    tasks: Sequence[Task]
    batch_size: int
    epochs: int | None = None  # None: without end
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("the data set holds no tasks")

    @property
    def draws(self) -> int | None:
        """Tasks drawn over all epochs; None without end."""
        return None if self.epochs is None else self.epochs * len(self.tasks)

    @property
    def batches(self) -> int | None:
        """Batches until the data ends (the last may be short); None without end."""
        return None if self.draws is None else -(-self.draws // self.batch_size)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of ids and data, in file order: another data set has another digest."""
        digest = sha256()
        for task in self.tasks:
            line = json.dumps([task.id, task.data], sort_keys=True, separators=(",", ":"))
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def batch(self, index: int) -> list[Task]:
        """The tasks of batch `index`, in order; shorter for the last one, empty after the end."""
        first = index * self.batch_size
        end = first + self.batch_size
        if self.draws is not None:
            end = min(end, self.draws)
        return [self.draw(number) for number in range(first, end)]

    def position(self, index: int) -> dict[str, Any]:
        """Where batch `index` begins, as a JSON value for checkpoints and people."""
        drawn = index * self.batch_size
        if self.draws is not None:
            drawn = min(drawn, self.draws)
        return {
            "batch": index,
            "drawn": drawn,
            "epoch": drawn // len(self.tasks),
            "row": drawn % len(self.tasks),
            "tasks": len(self.tasks),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sha256": self.sha256,
        }

    def verify(self, position: Mapping[str, Any]) -> None:
        """Check that a recorded position speaks of this data, in this order.

        Raises:
            DataChanged: names what differs; a resumed run must draw the tasks it would have drawn.
        """
        own = self.position(int(position["batch"]))
        for key in ("sha256", "tasks", "batch_size", "seed", "shuffle"):
            if position[key] != own[key]:
                raise DataChanged(
                    f"the data changed since this run began: {key} was {position[key]!r} and is "
                    f"{own[key]!r}; restore the data set, or start a new run"
                )

    def draw(self, number: int) -> Task:
        """The task drawn after `number` others, however many were drawn with it."""
        epoch, row = divmod(number, len(self.tasks))
        if not self.shuffle:
            return self.tasks[row]
        return self.tasks[_permutation(len(self.tasks), self.seed, epoch)[row]]


@lru_cache(maxsize=4)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    # Sorting by random() rather than shuffle(): only random() is promised to be the same in every
    # Python version.
    random = Random(fold("epoch", seed, epoch))
    keys = [random.random() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


def as_tasks(rows: Iterable[tuple[int, object]], *, origin: str, word: str = "row") -> list[Task]:
    """Tasks from numbered rows: a `Task`, or a mapping whose optional `id` names it.

    The other keys of a mapping are the task's data. Without an `id` the task is named by its
    place, counted from 0.

    Args:
        rows: Pairs of a row's number, for messages, and the row.
        origin: What the rows were read from, for messages.
        word: What a row is called in messages.

    Raises:
        ConfigError: names the row that is no task, repeats an id or holds what JSON cannot.
    """
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in rows:
        where = f"{origin}, {word} {number}"
        task = _as_task(row, len(tasks), where)
        if task.id in seen:
            raise ConfigError(
                f"{where}: id {task.id!r} was used by {word} {seen[task.id]} already; ids must be "
                "unique"
            )
        seen[task.id] = number
        tasks.append(task)
    return tasks


def _as_task(row: object, place: int, where: str) -> Task:
    name: object
    if isinstance(row, Task):
        name, data = row.id, row.data
    elif isinstance(row, Mapping):
        data = {key: value for key, value in row.items() if key != "id"}
        name = row.get("id", place)
    else:
        raise ConfigError(
            f"{where}: a {type(row).__name__} is no task; write a JSON object or a Task"
        )
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ConfigError(f"{where}: id {name!r} must be a string or an integer")
    reason = not_json(str(name), "id") or not_json(data)
    if reason is not None:
        raise ConfigError(f"{where}: {reason}; tasks hold JSON values only")
    return Task(str(name), dict(data))
