"""How the data of a run is divided among its trainer processes, also after their number has changed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from domain.data import TaskStream
from domain.mixing import MixedStream
from domain.rollouts import Task


@dataclass(frozen=True, slots=True)
class Division:
    """Which batch of the whole each batch of each share is: every n-th, counted from an origin.

    Batch `batch + i` of share s is batch `whole + i·n + s` of the whole, so that all shares together
    draw the batches that one process would, and an end that does not divide leaves the later shares
    one batch less. The origin is 0, 0 unless a run in data order, whose step i trains batch i of
    each share, was continued by another number of processes.
    """

    shares: int
    batch: int = 0
    whole: int = 0

    @classmethod
    def of(cls, world: Mapping[str, Any], shares: int) -> Self:
        """As a run's world records it."""
        return cls(shares, **world.get("division", {}))

    def origin(self) -> dict[str, int]:
        """What `of` reads besides the number of shares."""
        found = asdict(self)
        del found["shares"]
        return found

    def place(self, share: int, index: int) -> int:
        """The batch of the whole that is batch `index` of a share."""
        return self.whole + (index - self.batch) * self.shares + share

    def first(self, share: int, whole: int) -> int:
        """A share's first batch that is not before batch `whole` of the whole."""
        beyond = whole - self.whole - share
        return self.batch + max(0, -(-beyond // self.shares))

    def among(self, shares: int, *, step: int, ordered: bool) -> Self:
        """The division among another number of shares from a step on.

        Args:
            shares: their number.
            step: the first step that they train.
            ordered: whether step i trains batch i of each share; then all before it is done with.
        """
        if not ordered:
            return type(self)(shares)
        return type(self)(shares, step, self.place(0, step))


@dataclass(frozen=True)
class Share:
    """What one of several trainer processes draws of a stream."""

    stream: TaskStream | MixedStream
    share: int
    division: Division

    def batch(self, index: int) -> list[Task]:
        """The tasks of batch `index` of this share; empty after the end."""
        return self.stream.batch(self.division.place(self.share, index))

    def position(self, index: int) -> dict[str, Any]:
        """Where batch `index` of this share begins, in the whole stream."""
        return self.stream.position(self.division.place(self.share, index))

    def verify(self, position: Mapping[str, Any]) -> None:
        """As the whole stream does; the position may be any share's."""
        self.stream.verify(position)


def other_bits(before: int, after: int, step: int) -> str:
    """What a run gives up that other trainer processes continue, in words."""
    return (
        f"from step {step} on it is trained by {after} ranks instead of {before}: sums over ranks are "
        f"added in another order and a step trains {after} shares' groups instead of {before}, so that "
        f"its weights are other bits than {before} ranks would have made. The steps before it, and "
        "replays of the steps after it on as many ranks, stay bit-exact"
    )
