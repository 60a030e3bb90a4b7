"""How many rows a set of chains needs: first-fit decreasing (math: bin packing, Johnson 1973).

The packer lays chains out with `first_fit`, the planner decides with `rows_needed`; both must agree,
so both stand here.
"""

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], width: int) -> list[int]:
    """Row of each chain: longest first (stable), each into the first row with room.

    A tournament tree over the free space of the rows finds the first fit in O(log rows).

    Raises:
        ValueError: a chain is longer than a row.
    """
    if not lengths:
        return []
    longest = max(lengths)
    if longest > width:
        raise ValueError(f"a chain of {longest} tokens does not fit into a row of {width}")
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    free = [width] * (2 * leaves)  # free[i] = largest free space below node i
    rows = [0] * len(lengths)
    for chain in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need = lengths[chain]
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < need:
                node += 1
        rows[chain] = node - leaves
        free[node] -= need
        node //= 2
        while node:
            best = max(free[2 * node], free[2 * node + 1])
            if free[node] == best:
                break
            free[node] = best
            node //= 2
    return rows


def rows_needed(lengths: Sequence[int], width: int) -> int:
    """Rows that first-fit decreasing uses; depends only on the multiset of lengths.

    Raises:
        ValueError: a chain is longer than a row.
    """
    return max(first_fit(lengths, width), default=-1) + 1
