"""How old samples may be, and when the trainer must hold.

Notation of the whole module: c = trainer version (updates applied), B = groups a step, S = the
staleness bound, v = version of a group's oldest token, d = v + S its deadline (the last trainer
version at which it may train).

`wait` is earliest-deadline-first scheduling with capacity: after advancing, versions c+1, c+2, …
train B groups each, so the outstanding groups all fit iff for every deadline d

    N(d) = #{groups with deadline <= d} <= B * (d - c)        (0 when d <= c)

(Hall's condition for unit jobs on B parallel machines.) If any choice of B ready groups leaves a
feasible rest, the earliest deadlines do, so a hold means that no choice is safe now.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

G = TypeVar("G", int, str)


def too_old(version: int, current: int, bound: int) -> bool:
    """Whether a rollout whose oldest token has `version` may not train at `current`.

    Raises:
        ValueError: the version is newer than the trainer, which no honest ledger can hold.
    """
    if version > current:
        raise ValueError(f"version {version} is newer than the trainer's {current}")
    return current - version > bound


def slack(current: int, groups_per_step: int, bound: int, outstanding: Sequence[int]) -> int:
    """Places left at the tightest deadline if the trainer advanced now; negative means hold.

    `outstanding` holds the oldest version of each group that is submitted or admitted, without the
    batch about to be trained. B*S when nothing is outstanding.
    """
    tightest = binding(current, groups_per_step, bound, outstanding)
    return groups_per_step * bound if tightest is None else tightest[1]


def binding(
    current: int, groups_per_step: int, bound: int, outstanding: Sequence[int]
) -> tuple[int, int] | None:
    """`(deadline, slack)` of the tightest deadline; None when nothing is outstanding."""
    counts = Counter(version + bound for version in outstanding)
    tightest: tuple[int, int] | None = None
    due = 0
    for deadline in sorted(counts):
        due += counts[deadline]
        left = groups_per_step * max(0, deadline - current) - due
        if tightest is None or left < tightest[1]:
            tightest = (deadline, left)
    return tightest


def may_advance(current: int, groups_per_step: int, bound: int, outstanding: Sequence[int]) -> bool:
    """Whether every outstanding group can still train within the bound after one more update."""
    return slack(current, groups_per_step, bound, outstanding) >= 0


def choose_batch(
    ready: Mapping[G, int],
    running: Mapping[G, int],
    current: int,
    groups_per_step: int,
    bound: int,
    *,
    draining: bool = False,
) -> list[G] | None:
    """The groups to train now under `wait`, earliest deadline first; None means wait or hold.

    Args:
        ready: complete groups and the version of their oldest token.
        running: groups still sampled and the oldest version they can have.
        current: trainer version.
        groups_per_step: B.
        bound: S.
        draining: no further group will come, so a short rest may train.
    """
    if len(ready) < groups_per_step and (running or not draining):
        return None
    ranked = sorted(ready, key=lambda group: (ready[group], group))
    chosen = ranked[:groups_per_step]
    rest: list[int] = [ready[group] for group in ranked[groups_per_step:]]
    if not may_advance(current, groups_per_step, bound, [*rest, *running.values()]):
        return None
    return chosen


def submit_gate(
    current: int,
    groups_per_step: int,
    bound: int,
    outstanding: Sequence[int],
    served: int,
    wanted: int,
) -> int:
    """How many of `wanted` new groups may be submitted under `served` while step c is untrained.

    Slot c is still free, or held by planned groups that are counted in `outstanding`, so N(d) may
    reach B * (d - c + 1). May admit part of a batch; asked again at every poll.
    """
    deadlines = Counter(version + bound for version in outstanding)
    fresh = served + bound
    deadlines.setdefault(fresh, 0)
    allowed = wanted
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        room = groups_per_step * max(0, deadline - current + 1) - due
        if room < 0:
            return 0
        if deadline >= fresh:
            allowed = min(allowed, room)
    return allowed
