"""Several environments in one stream of tasks, by ratio.

The order is a pure function of the ratios, the seed and the position, as that of a single data set
(`domain.data`): of any sum-of-all-ratios draws in a row, each environment has exactly its ratio, and
they are spread as evenly as whole tasks allow. Each goes through its own data at its own pace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from domain.data import TaskStream
from domain.errors import DataChanged
from domain.rollouts import Task


@dataclass(frozen=True)
class Part:
    """One environment of a mix."""

    environment: str
    ratio: int
    stream: TaskStream  # without end


@dataclass(frozen=True, kw_only=True)
class MixedStream:
    """The batches of a mix. A task's id begins with its environment: `sums/17`.

    Example: ratios 3 and 1 draw a a b a, a a b a, and so on.
    """

    parts: Sequence[Part]
    batch_size: int

    @property
    def tasks(self) -> list[Task]:
        """All tasks of all environments, under the ids they are drawn by."""
        return [_named(part, task) for part in self.parts for task in part.stream.tasks]

    @property
    def batches(self) -> None:
        """Without end: each environment repeats."""
        return None

    @cached_property
    def cycle(self) -> list[tuple[int, int]]:
        """The draws after which everything repeats: the part, and its how-many-eth in this cycle.

        At each draw the part that lags most behind its share is next, the first named on a tie.
        """
        total = sum(part.ratio for part in self.parts)
        drawn = [0] * len(self.parts)
        cycle = []
        for number in range(1, total + 1):
            behind = [
                part.ratio * number - total * n for part, n in zip(self.parts, drawn, strict=True)
            ]
            chosen = behind.index(max(behind))
            cycle.append((chosen, drawn[chosen]))
            drawn[chosen] += 1
        return cycle

    def batch(self, index: int) -> list[Task]:
        """The tasks of batch `index`, in order."""
        first = index * self.batch_size
        return [self._draw(number) for number in range(first, first + self.batch_size)]

    def position(self, index: int) -> dict[str, Any]:
        """Where batch `index` begins, as a JSON value: of the whole, and of each environment."""
        drawn = index * self.batch_size
        cycles, rest = divmod(drawn, len(self.cycle))
        parts = {}
        for number, part in enumerate(self.parts):
            own = cycles * part.ratio + sum(chosen == number for chosen, _ in self.cycle[:rest])
            where = part.stream.position(0)
            length = len(part.stream.tasks)
            where |= {"drawn": own, "epoch": own // length, "row": own % length}
            parts[part.environment] = where | {"ratio": part.ratio}
        return {"batch": index, "drawn": drawn, "batch_size": self.batch_size, "mix": parts}

    def verify(self, position: Mapping[str, Any]) -> None:
        """Check that a recorded position speaks of this mix, in this order.

        Raises:
            DataChanged: names what differs.
        """
        own = self.position(int(position["batch"]))
        recorded = position.get("mix", {})
        if set(recorded) != set(own["mix"]):  # JSON in the ledger keeps no order
            raise DataChanged(
                f"the mix changed since this run began: it had {', '.join(recorded) or 'none'} and "
                f"has {', '.join(own['mix'])}; restore it, or start a new run"
            )
        for name, where in own["mix"].items():
            for key in ("sha256", "tasks", "seed", "shuffle", "ratio"):
                if recorded[name][key] != where[key]:
                    raise DataChanged(
                        f"environment {name} changed since this run began: {key} was "
                        f"{recorded[name][key]!r} and is {where[key]!r}; restore it, or start a new "
                        "run"
                    )
        if position["batch_size"] != self.batch_size:
            raise DataChanged(
                f"batch_size was {position['batch_size']} and is {self.batch_size}; restore it, or "
                "start a new run"
            )

    def _draw(self, number: int) -> Task:
        cycles, place = divmod(number, len(self.cycle))
        chosen, nth = self.cycle[place]
        part = self.parts[chosen]
        return _named(part, part.stream.draw(cycles * part.ratio + nth))


def _named(part: Part, task: Task) -> Task:
    return Task(f"{part.environment}/{task.id}", task.data)
