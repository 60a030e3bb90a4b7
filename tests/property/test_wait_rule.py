"""`wait` never lets a group expire, and holds only when it must: checked against brute force."""

import random
from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from domain.packing import rows_needed
from domain.planning import Hold, Ready, Running, Step, plan
from domain.staleness import choose_batch, may_advance, submit_gate


def fits(current: int, groups: int, deadlines: tuple[int, ...]) -> bool:
    """Exhaustive: can the deadlines be met by slots current+1, current+2, … of `groups` each?"""
    if not deadlines:
        return True
    slots = [v for v in range(current + 1, max(deadlines) + 1) for _ in range(groups)]
    if len(slots) < len(deadlines):
        return False
    for chosen in combinations(slots, len(deadlines)):
        left = list(chosen)
        for deadline in sorted(deadlines):
            usable = [slot for slot in left if slot <= deadline]
            if not usable:
                break
            left.remove(max(usable))
        else:
            return True
    return False


def planned(
    ready: Sequence[int], running: Sequence[int], current: int, groups: int, bound: int
) -> list[int] | Hold | None:
    """What PLAN does: the groups it takes, or its hold; None: it waits for more groups."""
    decision = plan(
        "deadline",
        [Ready(g, 0, g, version, (1,)) for g, version in enumerate(ready)],
        [Running(100 + g, version) for g, version in enumerate(running)],
        current=current,
        groups_per_step=groups,
        bound=bound,
        hold=True,
        draining=False,
        overflow="accumulate",
        rows=1,
        width=1,
        admit=groups,
    )
    if isinstance(decision, Step):
        return [row.group for row in decision.take]
    return decision if isinstance(decision, Hold) else None


def test_hold_rule_equals_exhaustive_matching_on_10_000_instances() -> None:
    """With the rule itself, and with PLAN when B fresh groups are ready."""
    draw = random.Random(7)
    for _ in range(10_000):
        groups, bound, current = draw.randint(1, 2), draw.randint(0, 3), 10
        ages = [current - draw.randint(0, bound) for _ in range(draw.randint(0, 5))]
        expected = fits(current, groups, tuple(v + bound for v in ages))
        assert may_advance(current, groups, bound, ages) is expected, (groups, bound, ages)
        decision = planned([current] * groups, ages, current, groups, bound)
        assert isinstance(decision, Hold) is not expected, (groups, bound, ages)


@given(
    groups=st.integers(1, 3),
    bound=st.integers(0, 3),
    ready=st.lists(st.integers(7, 10), max_size=6),
    running=st.lists(st.integers(7, 10), max_size=3),
)
@settings(max_examples=300)
def test_a_hold_means_that_no_choice_is_safe(
    groups: int, bound: int, ready: list[int], running: list[int]
) -> None:
    ready = [max(v, 10 - bound) for v in ready]
    running = [max(v, 10 - bound) for v in running]
    chosen = choose_batch(
        dict(enumerate(ready)), {100 + i: v for i, v in enumerate(running)}, 10, groups, bound
    )
    decision = planned(ready, running, 10, groups, bound)
    assert chosen == (decision if isinstance(decision, list) else None)
    if chosen is not None or len(ready) < groups:
        return
    for subset in combinations(range(len(ready)), groups):
        rest = [v for i, v in enumerate(ready) if i not in subset]
        assert not may_advance(10, groups, bound, [*rest, *running])


@given(
    groups=st.integers(1, 3),
    bound=st.integers(0, 3),
    outstanding=st.lists(st.integers(5, 10), max_size=8),
    served=st.integers(6, 10),
    wanted=st.integers(0, 8),
)
@settings(max_examples=500)
def test_the_gate_admits_as_many_as_fit_and_no_more(
    groups: int, bound: int, outstanding: list[int], served: int, wanted: int
) -> None:
    def fit(versions: list[int]) -> bool:
        due = [version + bound for version in versions]
        return all(sum(d <= at for d in due) <= groups * max(0, at - 10 + 1) for at in due)

    allowed = submit_gate(10, groups, bound, outstanding, served, wanted)
    fitting = [n for n in range(wanted + 1) if fit([*outstanding, *[served] * n])]
    assert allowed == max(fitting, default=0)


@given(st.lists(st.integers(1, 16), max_size=40), st.randoms())
def test_rows_needed_is_permutation_invariant(lengths: list[int], draw: random.Random) -> None:
    shuffled = list(lengths)
    draw.shuffle(shuffled)
    assert rows_needed(lengths, 16) == rows_needed(shuffled, 16)
    assert rows_needed(lengths, 16) * 16 >= sum(lengths)
