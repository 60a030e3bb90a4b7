"""Budget arithmetic: no sequence of requests ever exceeds a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.sampling import Limits, Spent, next_request

small = st.integers(1, 60)


def test_a_budget_of_100_in_segments_of_40() -> None:
    limits = Limits(generated=100, context=1000, segment=40)
    asked: list[int] = []
    while not isinstance(
        wanted := next_request(limits, Spent(generated=sum(asked), context=5 + sum(asked))), str
    ):
        asked.append(wanted)
    assert (asked, wanted) == ([40, 40, 20], "tokens")


@pytest.mark.parametrize(
    ("spent", "answering", "cap", "expected"),
    [
        (Spent(generated=0, context=10), False, None, 30),
        (Spent(generated=75, context=10), False, None, 5),
        (Spent(generated=80, context=10), False, None, "tokens"),
        (Spent(generated=80, context=10), True, None, 20),
        (Spent(generated=100, context=10), True, None, "tokens"),
        (Spent(generated=0, context=180), False, None, "context"),
        (Spent(generated=0, context=190), True, None, 10),
        (Spent(generated=50, context=10, turn=25), False, None, 5),
        (Spent(generated=50, context=10, turn=30), False, None, "turn_tokens"),
        (Spent(generated=50, context=10, turn=3), False, 7, 4),
        (Spent(generated=50, context=10, turn=3), False, 90, 27),
    ],
)
def test_the_smallest_allowance_decides(
    spent: Spent, answering: bool, cap: int | None, expected: int | str
) -> None:
    limits = Limits(generated=100, context=200, segment=40, turn=30, reserve=20)
    assert next_request(limits, spent, answering=answering, turn_cap=cap) == expected


@given(
    limits=st.builds(
        Limits,
        generated=small,
        context=small,
        segment=small,
        turn=st.none() | small,
        reserve=st.integers(0, 20),
    ),
    prompt=st.integers(0, 80),
    shares=st.lists(st.floats(0.01, 1.0), max_size=20),
)
def test_no_limit_is_ever_exceeded(limits: Limits, prompt: int, shares: list[float]) -> None:
    used, answering, answered = 0, False, 0
    for share in shares:
        spent = Spent(generated=used, context=prompt + used, turn=used)
        wanted = next_request(limits, spent, answering=answering)
        if isinstance(wanted, str):
            if answering:
                break
            answering, answered = True, used
            continue
        assert 1 <= wanted <= limits.segment
        used += max(1, int(wanted * share))  # an engine may stop early
        assert used <= limits.generated
        assert prompt + used <= limits.context
        assert limits.turn is None or used <= limits.turn
        if not answering:
            assert used <= limits.generated - limits.reserve
    assert answered <= limits.generated
