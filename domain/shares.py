"""How the data of a run is divided among its trainer processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domain.data import TaskStream
from domain.mixing import MixedStream
from domain.rollouts import Task


@dataclass(frozen=True)
class Share:
    """Every n-th batch of a stream: what one of n trainer processes draws.

    Batch i of share s is batch i·n + s of the whole, so that all shares together draw the batches
    that one process would, and an end that does not divide leaves the later shares one batch less.
    """

    whole: TaskStream | MixedStream
    share: int
    shares: int

    def batch(self, index: int) -> list[Task]:
        """The tasks of batch `index` of this share; empty after the end."""
        return self.whole.batch(index * self.shares + self.share)

    def position(self, index: int) -> dict[str, Any]:
        """Where batch `index` of this share begins, in the whole stream."""
        return self.whole.position(index * self.shares + self.share)

    def verify(self, position: Mapping[str, Any]) -> None:
        """As the whole stream does; the position may be any share's."""
        self.whole.verify(position)
