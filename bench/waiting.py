"""How long the trainer waits for heavy-tailed rollouts: simulated with the planner's own functions.

    python -m bench.waiting [--steps 200] [--seeds 5]

Durations are log-normal with σ = 1; an engine has a fixed number of slots, served in the order of
submission. The same durations go through three schedules:

    synchronous   a batch is submitted when the step before it is trained
    pipelined     ahead = 2, oversample = 1, deadline order, holding at max_lag = 2
    list          every sample is submitted at the start, no slot ever idles and nothing is ever too
                  old: the bound for a schedule that does not know the durations

`load` is the sampling time of a step over its training time, if no slot ever idled: above 1 the
engine is the bottleneck, and the list schedule waits too. Waiting is the trainer's share of its
time; the last column is how fast pipelined trains, measured by the list schedule.
"""

import argparse
import heapq
import json
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from domain.planning import Ready, Running, Step, plan
from domain.staleness import submit_gate

BATCH, SIZE, SPARES = 8, 8, 1
SLOTS = 64
TRAIN_S = 1.0
LOADS = (0.5, 0.8, 1.0, 1.25)
SIGMA = 1.0

Durations = Sequence[Sequence[float]]
"""Seconds of each sample of each group."""


@dataclass(slots=True)
class Group:
    """A group that is sampled. A sample pins the version that is served when it starts."""

    number: int
    queued: int
    submitted: int
    pins: list[int] = field(default_factory=list)
    members: list[int] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        """The oldest version that a member can have."""
        return self.submitted if self.queued else min(self.pins)


@dataclass
class Run:
    """One run on simulated time; every version is served as soon as it is trained."""

    durations: Durations
    ahead: int
    max_lag: int
    now: float = 0.0
    version: int = 0
    drawn: int = 0
    sampling: dict[int, Group] = field(default_factory=dict)
    ready: list[Ready] = field(default_factory=list)
    queue: deque[tuple[Group, float]] = field(default_factory=deque)
    live: list[tuple[float, int, int, Group]] = field(default_factory=list)
    """Heap of (end, tie-break, pinned version, group), one for each busy slot."""
    starts: int = 0

    def waiting(self, steps: int) -> float:
        """The trainer's share of waiting over so many steps."""
        waited = 0.0
        for _ in range(steps):
            asked = self.now
            self.submit(())
            while (taken := self.plan()) is None:
                self.end_next()
                self.submit(())
            waited += self.now - asked
            trained = self.now + TRAIN_S
            self.submit(taken)
            while self.live and self.live[0][0] <= trained:
                self.end_next()
                self.submit(taken)
            self.now = trained
            self.version += 1
        return waited / self.now

    def plan(self) -> tuple[Ready, ...] | None:
        """The groups of the next step; None while it waits or holds."""
        decision = plan(
            "deadline",
            self.ready,
            [Running(group.number, group.oldest) for group in self.sampling.values()],
            current=self.version,
            groups_per_step=BATCH,
            bound=self.max_lag,
            hold=True,
            draining=False,
            overflow="accumulate",
            rows=1,
            width=1,
            admit=BATCH,
        )
        if not isinstance(decision, Step):
            return None
        self.ready = [row for row in self.ready if row not in decision.take]
        return decision.take

    def submit(self, planned: Sequence[Ready]) -> None:
        """Hand over what the places and the gate allow. Rows that train now still hold theirs."""
        held = [row.version for row in (*planned, *self.ready)]
        held += [group.oldest for group in self.sampling.values()]
        places = min((self.ahead + 1) * BATCH - len(held), len(self.durations) - self.drawn)
        for _ in range(
            submit_gate(self.version, BATCH, self.max_lag, held, self.version, max(0, places))
        ):
            samples = self.durations[self.drawn]
            group = self.sampling[self.drawn] = Group(self.drawn, len(samples), self.version)
            self.queue.extend((group, duration) for duration in samples)
            self.drawn += 1
        self.fill()

    def fill(self) -> None:
        """Give free slots to what was submitted first."""
        while self.queue and len(self.live) < SLOTS:
            group, duration = self.queue.popleft()
            if len(group.members) == SIZE:
                continue  # a spare that is needed no more
            group.queued -= 1
            group.pins.append(self.version)
            self.starts += 1
            heapq.heappush(self.live, (self.now + duration, self.starts, self.version, group))

    def end_next(self) -> None:
        """Let the next sample end. The last one that its group needs frees the group's spares."""
        self.now, _, version, group = heapq.heappop(self.live)
        group.members.append(version)
        if len(group.members) == SIZE:
            self.live = [entry for entry in self.live if entry[-1] is not group]
            heapq.heapify(self.live)
            del self.sampling[group.number]
            self.ready.append(Ready(group.number, 0, self.starts, min(group.members), (1,)))
        self.fill()


def synchronous(durations: Durations, steps: int) -> float:
    """Sample a batch to its end, train it."""
    return Run([samples[:SIZE] for samples in durations], ahead=0, max_lag=0).waiting(steps)


def pipelined(durations: Durations, steps: int) -> float:
    """Two steps ahead, one spare a group."""
    return Run(durations, ahead=2, max_lag=2).waiting(steps)


def listed(durations: Durations, steps: int) -> float:
    """All samples in line for the first free slot; the trainer takes groups as they complete."""
    slots = [0.0] * SLOTS
    complete = []
    for samples in durations:
        ends = [heapq.heapreplace(slots, slots[0] + d) + d for d in samples[:SIZE]]
        complete.append(max(ends))
    complete.sort()
    now = waited = 0.0
    for due in complete[BATCH - 1 : steps * BATCH : BATCH]:
        waited += max(0.0, due - now)
        now = max(now, due) + TRAIN_S
    return waited / now


def draw(seed: int, load: float, steps: int) -> Durations:
    """Durations that keep the slots busy for `load` training times a step."""
    chance = random.Random(seed)
    mean = load * TRAIN_S * SLOTS / (BATCH * SIZE)
    mu = math.log(mean) - SIGMA**2 / 2
    groups = (steps + 4) * BATCH  # the last steps still have something ahead of them
    return [[chance.lognormvariate(mu, SIGMA) for _ in range(SIZE + SPARES)] for _ in range(groups)]


def main() -> None:
    """Print the table, and the same as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    print("      trainer waits, % of its time        waiting of pipelined to   its speed")
    print("load  synchronous  pipelined     list    synchronous        list    to list")
    result = {}
    for load in LOADS:
        drawn = [draw(seed, load, chosen.steps) for seed in range(chosen.seeds)]
        synced, piped, bound = (
            statistics.mean(schedule(durations, chosen.steps) for durations in drawn)
            for schedule in (synchronous, pipelined, listed)
        )
        ratios = {
            "to_synchronous": piped / synced,
            "to_list": piped / bound,
            "speed_to_list": (1 - piped) / (1 - bound),
        }
        print(
            f"{load:<6}{synced:>11.1%}{piped:>11.1%}{bound:>9.1%}"
            f"{ratios['to_synchronous']:>15.2f}{ratios['to_list']:>12.2f}"
            f"{ratios['speed_to_list']:>11.2f}"
        )
        waits = {"synchronous": synced, "pipelined": piped, "list": bound}
        result[str(load)] = waits | ratios
    print(json.dumps(result))


if __name__ == "__main__":
    main()
