"""Strict prefix merge and first-fit decreasing."""

import numpy as np
import pytest

from domain.chains import chain_lengths, merge
from domain.packing import first_fit, rows_needed
from domain.rollouts import Segment


def segment(prompt: list[int], sampled: list[int], version: int = 0) -> Segment:
    return Segment(prompt, sampled, [-0.5] * len(sampled), "stop", version)


def test_a_prompt_that_extends_the_chain_joins_it() -> None:
    chains = merge([segment([1, 2, 3], [4, 5]), segment([1, 2, 3, 4, 5, 9, 9], [6, 7])])
    assert [list(c.ids) for c in chains] == [[1, 2, 3, 4, 5, 9, 9, 6, 7]]
    assert [(s.start, s.stop, s.segment) for s in chains[0].spans] == [(3, 5, 0), (7, 9, 1)]


def test_a_rewritten_history_starts_a_new_chain() -> None:
    assert chain_lengths([segment([1, 2, 3], [8, 5]), segment([1, 2, 3, 8, 7], [6])]) == [5, 6]


def test_only_the_last_chain_can_be_extended() -> None:
    first, second = segment([1], [2]), segment([5], [6])
    assert chain_lengths([first, second, segment([1, 2, 3], [4])]) == [2, 2, 4]


def test_a_segment_that_sampled_nothing_takes_no_row() -> None:
    assert chain_lengths([segment([1, 2], [])]) == []
    assert chain_lengths([segment([1, 2], [3]), segment([1, 2, 3, 4, 4], [])]) == [3]


def test_numpy_ids_merge_like_lists() -> None:
    first = Segment(np.array([1, 2], np.int32), np.array([3], np.int32), [0.0], "stop", 0)
    second = Segment(np.array([1, 2, 3, 4], np.int64), np.array([5], np.int64), [0.0], "stop", 0)
    assert [list(c.ids) for c in merge([first, second])] == [[1, 2, 3, 4, 5]]


def test_first_fit_decreasing_is_stable() -> None:
    assert first_fit([5, 7, 3, 7, 2, 4], 10) == [2, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("admitted", "new", "width", "rows"),
    [
        ([6, 6], [5, 5], 10, 3),
        ([6, 6], [4, 4], 10, 2),
        ([6, 4], [10], 10, 2),
        ([9, 9], [2, 2], 10, 3),
        ([9, 9], [2, 9], 10, 4),
        ([3, 3, 3], [3, 3, 3], 10, 2),
    ],
)
def test_rows_needed(admitted: list[int], new: list[int], width: int, rows: int) -> None:
    assert rows_needed(admitted + new, width) == rows


def test_a_chain_wider_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into a row of 64"):
        rows_needed([65], 64)
