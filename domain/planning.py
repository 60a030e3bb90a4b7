"""Which groups a step trains: one pure function over what is ready and what still runs.

The ledger's PLAN transaction reads `ready` and `running` in one snapshot, calls `plan`, and writes
the answer. Every answer may carry `cut` rows, and they are written whatever the answer is: a group
that is filtered out must free its place at once, or nothing new is submitted and the run hangs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from domain.packing import rows_needed
from domain.staleness import binding

Order = Literal["dataset", "deadline", "admission"]


@dataclass(frozen=True, slots=True)
class Ready:
    """An admitted part of a group."""

    group: int
    part: int
    seq: int  # completion order
    version: int  # of its oldest token
    lengths: tuple[int, ...]  # chains that take rows
    batch: int = 0
    pos: int = 0
    zero_variance: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A group that is still sampled (or, under order `dataset`, registered)."""

    group: int
    version: int  # the oldest it can have


@dataclass(frozen=True, slots=True)
class Cut:
    """A complete group that will not train, with the rows it would have needed."""

    row: Ready
    cause: Literal["rows", "zero_variance"]
    rows_needed: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not enough groups are complete."""

    reason: str
    cut: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """Advancing now would let an outstanding group grow too old (`stale_policy="wait"`)."""

    binding_deadline: int
    slack: int
    binding_groups: tuple[int, ...]
    cut: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Nothing is left to train."""

    cut: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Train `take` in this order; `cut` is left out; `surplus` is cancelled or withdrawn."""

    take: tuple[Ready, ...]
    cut: tuple[Cut, ...] = ()
    surplus: tuple[Ready | Running, ...] = ()


Decision = Wait | Hold | End | Step


def plan(
    order: Order,
    ready: Sequence[Ready],
    running: Sequence[Running],
    *,
    current: int,
    groups_per_step: int,
    bound: int,
    hold: bool,
    draining: bool,
    overflow: Literal["cut", "accumulate"],
    rows: int,
    width: int,
    admit: int,
    exists: bool = True,
    filter_zero_variance: bool = False,
) -> Decision:
    """Decide the next step.

    Args:
        order: `dataset` sees the groups of one batch alone; the others see all of them.
        ready: admitted and not planned.
        running: groups that may still be admitted.
        current: trainer version c.
        groups_per_step: B.
        bound: S.
        hold: whether the policy is `wait`.
        draining: the data ended and nothing is registered any more.
        overflow: `cut` leaves out what does not fit into `rows` rows of `width` tokens.
        rows: rows of one micro-batch.
        width: tokens of a row.
        admit: groups of a batch that train (`dataset`).
        exists: `dataset`: the batch lies within the data.
        filter_zero_variance: leave out groups without any difference in reward (not `dataset`).
    """
    if order == "dataset":
        if not exists:
            return End()
        return _plan_batch(ready, running, overflow, rows, width, admit)
    cut: tuple[Cut, ...] = ()
    if filter_zero_variance:
        cut = tuple(
            Cut(row, "zero_variance", rows_needed(row.lengths, width))
            for row in ready
            if row.zero_variance
        )
        ready = [row for row in ready if not row.zero_variance]
    if len(ready) < groups_per_step and (running or not draining):
        return Wait(f"{len(ready)} of {groups_per_step} groups are complete", cut)
    if not ready:
        return End(cut)
    ranked = sorted(
        ready,
        key=(lambda r: (r.version, r.group, r.part))
        if order == "deadline"
        else (lambda r: (r.seq, r.group, r.part)),
    )
    take, rest = ranked[:groups_per_step], ranked[groups_per_step:]
    outstanding: list[Ready | Running] = [*rest, *running]
    if hold:
        tightest = binding(current, groups_per_step, bound, [o.version for o in outstanding])
        if tightest is not None and tightest[1] < 0:
            deadline, left = tightest
            late = tuple(o.group for o in outstanding if o.version + bound <= deadline)
            return Hold(deadline, left, late, cut)
    return Step(tuple(take), cut)


def _plan_batch(
    ready: Sequence[Ready],
    running: Sequence[Running],
    overflow: Literal["cut", "accumulate"],
    rows: int,
    width: int,
    admit: int,
) -> Decision:
    """Order `dataset`: completion order, the fit test first, then the count."""
    take: list[Ready] = []
    cut: list[Cut] = []
    over: list[Ready] = []
    lengths: list[int] = []
    for row in sorted(ready, key=lambda r: r.seq):
        if len(take) == admit:
            over.append(row)
        elif overflow == "accumulate" or rows_needed([*lengths, *row.lengths], width) <= rows:
            take.append(row)
            lengths.extend(row.lengths)
        else:
            cut.append(Cut(row, "rows", rows_needed(row.lengths, width)))
    if len(take) < admit and running:
        return Wait(f"{len(take)} of {admit} groups of the batch are complete")
    in_data_order = sorted(take, key=lambda r: (r.batch, r.pos, r.part))
    return Step(tuple(in_data_order), tuple(cut), (*over, *running))
