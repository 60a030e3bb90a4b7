"""`wait` over 200 updates with a heavy tail: nothing expires, the bound holds, nothing stands still.

The trainer's rules are the real ones (`submit_gate`, `plan`); time, durations and steps without a
gradient are simulated.
"""

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from domain.planning import End, Hold, Ready, Running, Step, plan
from domain.staleness import submit_gate

UPDATES = 200
FEASIBLE = [
    (groups, bound, ahead, every)
    for groups, bound, ahead, every in product((1, 2, 4), range(5), range(5), (1, 2))
    if ahead + every - 1 <= bound
]


@dataclass
class Simulation:
    groups: int
    bound: int
    ahead: int
    every: int
    order: str = "deadline"
    draw: random.Random = field(default_factory=lambda: random.Random(11))
    now: float = 0.0
    version: int = 0
    served: int = 0
    drawn: int = 0
    running: dict[int, tuple[float, int]] = field(default_factory=dict)
    ready: list[Ready] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    expired: int = 0
    held: int = 0

    def hand_over(self) -> None:
        versions = [r.version for r in self.ready] + [v for _, v in self.running.values()]
        wanted = max(0, (self.ahead + 1) * self.groups - len(versions))
        allowed = submit_gate(self.version, self.groups, self.bound, versions, self.served, wanted)
        for _ in range(allowed):
            tail = min(400.0, self.draw.paretovariate(0.9))  # mostly short, now and then endless
            self.running[self.drawn] = (self.now + tail, self.served)
            self.drawn += 1

    def finish(self, until: float) -> None:
        for group, (at, version) in sorted(self.running.items(), key=lambda item: item[1]):
            if at <= until:
                del self.running[group]
                self.ready.append(Ready(group, 0, len(self.lags) + len(self.ready), version, (1,)))

    def step(self) -> bool:
        """One poll; False: nothing can ever change again."""
        if self.version - self.served >= self.every:
            self.served = self.version
        self.hand_over()
        self.finish(self.now)
        outstanding = [r.version for r in self.ready] + [v for _, v in self.running.values()]
        self.expired += sum(self.version - version > self.bound for version in outstanding)
        decision = plan(
            self.order,  # type: ignore[arg-type]
            self.ready,
            [Running(g, v) for g, (_, v) in sorted(self.running.items())],
            current=self.version,
            groups_per_step=self.groups,
            bound=self.bound,
            hold=True,
            draining=False,
            overflow="accumulate",
            rows=1,
            width=1,
            admit=self.groups,
        )
        if isinstance(decision, Step):
            taken = {r.group for r in decision.take}
            self.ready = [r for r in self.ready if r.group not in taken]
            self.lags += [self.version - r.version for r in decision.take]
            self.now += 1.0
            self.version += self.draw.random() > 0.05  # a step may lack a usable gradient
            return True
        assert not isinstance(decision, End)
        self.held += isinstance(decision, Hold)
        if not self.running:
            return False
        self.now = max(self.now, min(at for at, _ in self.running.values()))
        return True


@pytest.mark.parametrize(("groups", "bound", "ahead", "every"), FEASIBLE)
def test_wait_expires_nothing_and_never_stands_still(
    groups: int, bound: int, ahead: int, every: int
) -> None:
    run = Simulation(groups, bound, ahead, every)
    while run.version < UPDATES:
        assert run.step(), "livelock"
    assert run.expired == 0
    assert max(run.lags) <= bound
    assert sum(run.lags) / len(run.lags) <= ahead + every - 1 + 1e-9


def test_the_grid_is_wide_and_holds_do_happen() -> None:
    assert len({setting[:3] for setting in FEASIBLE}) >= 30
    run = Simulation(2, 2, 2, 1)
    while run.version < UPDATES:
        assert run.step()
    assert run.held > 0


def test_completion_order_with_a_hold_stands_still() -> None:
    """Why `order = "admission"` is refused under `wait`."""
    run = Simulation(2, 2, 2, 1, order="admission")
    for _ in range(20_000):
        if run.version >= UPDATES or not run.step():
            break
    assert run.version < UPDATES
