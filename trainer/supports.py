"""Kept sets in packed rows: what filtered sampling left of the vocabulary for each sampled id.

A row holds the kept ids of its sampled ids back to back, `support_ids`, and for each the column of the
sampled id that it was kept for, `support_columns`; -1 is padding. Tokens without loss need no set.

Engines keep every id that ties with the last of the `top_k`, and half-precision logits tie often: a
row can hold more than `top_k` times its width. A sampled log-probability is normalised over all of
them, so none may be left out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from domain.rollouts import Numbers, Segment

REMEDY = "top_k times the width of a row is enough, but for ties at the last place"


def counts(support: Sequence[Numbers], keep: NDArray[np.bool_] | bool) -> NDArray[np.intp]:
    """Kept ids of each sampled id that takes loss."""
    found = np.fromiter((len(kept) for kept in support), dtype=np.intp, count=len(support))
    found *= np.broadcast_to(keep, found.shape)
    return found


def room(kept: Sequence[int], capacity: int | None, *, grows: bool) -> int | None:
    """Kept ids that every row gets room for; None without filtered sampling.

    Args:
        kept: ids that each row holds.
        capacity: what was asked for.
        grows: whether rows that need more get it.

    Raises:
        ValueError: sampling was filtered and there is no room, or too little.
    """
    most = max(kept, default=0)
    if most == 0 or (capacity is not None and most <= capacity):
        return capacity
    if capacity is None:
        raise ValueError(
            "sampling was filtered, so the rows need room for the kept ids: set support_capacity "
            f"({REMEDY})"
        )
    if grows:
        return most
    raise ValueError(
        f"row {kept.index(most)} holds {most} kept ids, more than support_capacity = {capacity}; "
        f"raise it ({REMEDY})"
    )


def fill(
    ids: NDArray[np.int32],
    columns: NDArray[np.int32],
    filled: int,
    first: int,
    segment: Segment,
    keep: NDArray[np.bool_] | bool,
) -> int:
    """Append a segment's kept sets to its row; returns how full the row is.

    Args:
        ids: the row's `support_ids`.
        columns: the row's `support_columns`.
        filled: how full the row was.
        first: column of the segment's first sampled id.
        segment: with its kept sets.
        keep: which of its sampled ids take loss.

    Raises:
        ValueError: a set holds an id twice, or not the sampled one.
    """
    support = segment.support
    assert support is not None
    of_each = counts(support, keep)
    total = int(of_each.sum())
    if total == 0:
        return filled
    kept = np.concatenate(
        [np.asarray(kept, dtype=np.int32) for kept, n in zip(support, of_each, strict=True) if n]
    )
    owner = np.repeat(np.arange(len(support)), of_each)
    _check(kept, owner, np.asarray(segment.sampled_ids, dtype=np.int32), of_each)
    ids[filled : filled + total] = kept
    columns[filled : filled + total] = first + owner
    return filled + total


def _check(
    kept: NDArray[np.int32],
    owner: NDArray[np.intp],
    sampled: NDArray[np.int32],
    of_each: NDArray[np.intp],
) -> None:
    """Each set must hold the sampled id, exactly once, or its log-probability means nothing."""
    keys = np.sort(owner.astype(np.int64) << 32 | kept.astype(np.int64))
    found = np.bincount(owner, kept == sampled[owner], len(sampled))
    if (keys[1:] == keys[:-1]).any() or (found[of_each > 0] != 1).any():
        bad = int(np.argmax((of_each > 0) & (found != 1)))
        raise ValueError(
            f"the ids kept by filtered sampling must be distinct and hold the sampled id; they do "
            f"not for sampled id {int(sampled[bad])} (number {bad} of its segment)"
        )
