"""The KV of running requests: one slot per request, one column per position.

Slots 0..n-1 are in use, so a forward over them reads views and copies nothing. A request's KV
starts at column 0, whatever its neighbours' lengths: a mask hides the rest. Growing doubles, so
copying is amortised.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

COLUMNS = 64


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one position's keys and values."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values at one position."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class Slots(Cache):
    """What transformers sees as its cache. `window` says which slots the next forward is about."""

    def __init__(self, shape: KVShape) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.rows = 0
        self.columns = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)
        self._allocate(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows * self.columns * self.shape.bytes_per_token

    def needed(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns that `fit` would hold."""
        if rows <= self.rows and columns <= self.columns:
            return self.rows, self.columns
        wide = self.columns
        if columns > wide:
            wide = max(columns, min(2 * wide, columns + 1024))
            wide = -(-wide // COLUMNS) * COLUMNS
        return (self.rows if rows <= self.rows else max(rows, 2 * self.rows)), wide

    def fit(self, rows: int, columns: int) -> None:
        """Make room for so many slots and positions, keeping what is there."""
        wanted = self.needed(rows, columns)
        if wanted != (self.rows, self.columns):
            self._allocate(*wanted)

    def trim(self, rows: int) -> None:
        """Give up slots beyond the first `rows`; with none left, all memory."""
        if rows < self.rows:
            self._allocate(rows, self.columns if rows else 0)

    def window(self, first: int, last: int, at_BQ: Tensor, columns: int) -> None:
        """The next forward writes slots first..last-1 at these columns, and sees `columns` of each."""
        at_B1Q1 = at_BQ[:, None, :, None]
        s, (count, width) = self.shape, at_BQ.shape
        self._key_at = at_B1Q1.expand(count, s.heads, width, s.key_dim)
        self._value_at = at_B1Q1.expand(count, s.heads, width, s.value_dim)
        self._keys = self.keys[:, first:last].unbind(0)
        self._values = self.values[:, first:last].unbind(0)
        self._columns = columns

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return all that the mask may let through."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.scatter_(2, self._key_at, key_states)
        values.scatter_(2, self._value_at, value_states)
        return keys[:, :, : self._columns], values[:, :, : self._columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions the next forward sees."""
        return self._columns

    def read(self, row: int, columns: int) -> tuple[Tensor, Tensor]:
        """A copy of the first columns of a slot, for the prefix cache."""
        return self.keys[:, row, :, :columns].clone(), self.values[:, row, :, :columns].clone()

    def write(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Put retained KV into the first columns of a slot."""
        columns = keys.shape[2]
        self.keys[:, row, :, :columns] = keys
        self.values[:, row, :, :columns] = values

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first columns of one slot to another."""
        self.keys[:, target, :, :columns] = self.keys[:, source, :, :columns]
        self.values[:, target, :, :columns] = self.values[:, source, :, :columns]

    def wipe(self, row: int) -> None:
        """Zero a slot. Hidden columns take part with weight 0, and 0 times NaN is NaN."""
        self.keys[:, row] = 0
        self.values[:, row] = 0

    def _allocate(self, rows: int, columns: int) -> None:
        s = self.shape
        keys = torch.zeros(s.layers, rows, s.heads, columns, s.key_dim, dtype=s.dtype)
        values = torch.zeros(s.layers, rows, s.heads, columns, s.value_dim, dtype=s.dtype)
        r, c = min(rows, self.rows), min(columns, self.columns)
        if r and c:
            keys[:, :r, :, :c] = self.keys[:, :r, :, :c]
            values[:, :r, :, :c] = self.values[:, :r, :, :c]
        self.keys, self.values, self.rows, self.columns = keys, values, rows, columns
