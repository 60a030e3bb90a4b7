"""What the tests of a loop of one's own share: its source, its model, its steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domain.rollouts import Task
from domain.services import Services
from rollbook import RolloutScheduler
from tests.own_loop import Scored, Trained, update

BATCHES = [[2 * i, 2 * i + 1] for i in range(6)]


Loop = Callable[..., RolloutScheduler]


def reward(text: str, task: Task) -> float:
    raise AssertionError("rollouts are played")


def to_tasks(batch: list[int]) -> list[Task]:
    return [Task(f"t{n}", {"prompt": f"{7 * n % 1000:03d}="}) for n in batch]


class Alone:
    """Services without any process beside the loop."""

    def __init__(self, services: Services | None, state: Path) -> None:
        assert services is not None
        self.services = services
        self.closed = False

    def start(self, config: object, located: object) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


Seen = list[dict[str, Any]]


def train(
    one: RolloutScheduler, state: Trained, batches: Any = BATCHES, *, steps: int = 99
) -> Seen:
    """Train up to so many steps; the rows of each."""
    seen: Seen = []
    for batch in one.tasks(batches):
        packed = one(state, batch)
        seen.append(packed)
        one.applied(updated=update(state, Scored(), packed))
        if len(seen) == steps:
            break
    return seen


def same(one: Seen, other: Seen) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)
        for a, b in zip(one, other, strict=True)
    )


def one_step(name: str) -> dict[str, Any]:
    return {"format": 1, "run": name, "step": 1, "version": 1}


class Pushing:
    """A publisher of one's own; its engines are played."""

    def __init__(self, start: int = -1) -> None:
        self.version = start
        self.pushed: list[int] = []
        self.takes = True

    def load(self, weights: Any, version: int) -> None:
        assert "lm_head.weight" in weights
        self.pushed.append(version)
        if self.takes:
            self.version = version


@contextmanager
def played_health(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that take what they are pushed. What they answer is invented, and when they begin to is
    chance, so whether it looks like drift is too."""
    monkeypatch.setattr("rollbook.publishing._incarnation", lambda url: 1)
    monkeypatch.setattr("rollbook.own_run.DriftGuard.watch", lambda *_: None)
    yield


def abandon(one: RolloutScheduler) -> None:
    """What kill -9 leaves: the ledger as it is, the lease not given back."""
    assert one._run is not None
    one._run.release()
    one._companions = None
