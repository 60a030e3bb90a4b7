"""Retained KV: a prompt that starts like an earlier one is not computed again.

Keys are chains of block hashes that begin with the request's salt, filed under a *lineage*: the run
and the oldest and newest weights that computed the KV. A plain request reads only KV of exactly its
own version; one with `kv_max_staleness` K also reads KV whose oldest part is up to K versions older.
A lineage names versions, and a version's name never means other weights, so KV cannot outlive its
weights unnoticed.

Each entry is the KV of one whole sequence, in blocks; a longer sequence with the same start
replaces it. Least recently used entries go first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from torch import Tensor

BLOCK = 16


class Lineage(NamedTuple):
    """Which weights computed the KV."""

    run: str
    oldest: int
    newest: int


@dataclass(slots=True, eq=False)
class Entry:
    """KV of one sequence, with the keys that still point to it."""

    keys_at: Tensor
    values_at: Tensor
    live: set[tuple[Lineage, bytes]]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys_at.nbytes + self.values_at.nbytes


class Hit(NamedTuple):
    """KV found for the first `tokens` ids of a prompt."""

    tokens: int
    lineage: Lineage
    keys: Tensor
    values: Tensor


def chain(salt: str, ids: Sequence[int]) -> list[bytes]:
    """One hash per whole block of ids; each covers all ids before it, and the salt."""
    digest = blake2b(salt.encode(), digest_size=16).digest()
    blocks = np.asarray(ids[: len(ids) // BLOCK * BLOCK], dtype="<i8").reshape(-1, BLOCK)
    hashes = []
    for block in blocks:
        digest = blake2b(digest + block.tobytes(), digest_size=16).digest()
        hashes.append(digest)
    return hashes


class Prefixes:
    """The store, shared by all policies of one engine. Used by the scheduler's thread only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Most bytes held; 0 retains nothing."""
        self.nbytes = 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._index: dict[tuple[Lineage, bytes], tuple[int, int]] = {}
        self._lineages: dict[Lineage, int] = {}
        self._next = 0

    def find(
        self, run: str, version: int, max_staleness: int, hashes: Sequence[bytes]
    ) -> Hit | None:
        """The longest retained start of a prompt that a request of this version may extend."""
        best: Hit | None = None
        for lineage in self._readable(run, version, max_staleness):
            floor = best.tokens // BLOCK if best else 0
            for blocks in range(len(hashes), floor, -1):
                found = self._index.get((lineage, hashes[blocks - 1]))
                if found is not None:
                    entry = self._entries[found[0]]
                    self._entries.move_to_end(found[0])
                    tokens = blocks * BLOCK
                    best = Hit(
                        tokens,
                        lineage,
                        entry.keys_at[:, :, :tokens],
                        entry.values_at[:, :, :tokens],
                    )
                    break
        return best

    def holds(self, lineage: Lineage, hashes: Sequence[bytes]) -> bool:
        """Whether `keep` of this sequence would add nothing."""
        return not hashes or self.limit == 0 or (lineage, hashes[-1]) in self._index

    def keep(self, lineage: Lineage, hashes: Sequence[bytes], keys: Tensor, values: Tensor) -> None:
        """Retain the KV of a sequence's whole blocks."""
        entry = Entry(keys, values, set())
        if not hashes or entry.nbytes > self.limit:
            return
        name, self._next = self._next, self._next + 1
        self._entries[name] = entry
        self.nbytes += entry.nbytes
        for blocks, digest in enumerate(hashes, 1):
            key = (lineage, digest)
            before = self._index.get(key)
            if before is not None:
                self._forget(before[0], [key])
            self._index[key] = (name, blocks)
            entry.live.add(key)
            self._lineages[lineage] = self._lineages.get(lineage, 0) + 1
        while self.nbytes > self.limit:
            oldest = next(iter(self._entries))
            self._forget(oldest, list(self._entries[oldest].live))

    def drop(self, run: str, version: int) -> None:
        """Let go of everything computed by a version that is no longer resident."""
        for name, entry in list(self._entries.items()):
            gone = [key for key in entry.live if key[0].run == run and key[0].newest == version]
            self._forget(name, gone)

    def _readable(self, run: str, version: int, max_staleness: int) -> Iterator[Lineage]:
        own = Lineage(run, version, version)
        yield own
        if max_staleness:
            older = (
                x
                for x in self._lineages
                if x.run == run and version - max_staleness <= x.oldest and x.newest <= version
            )
            yield from sorted((x for x in older if x != own), key=lambda x: -x.oldest)

    def _forget(self, name: int, keys: Iterable[tuple[Lineage, bytes]]) -> None:
        entry = self._entries[name]
        for key in keys:
            entry.live.discard(key)
            del self._index[key]
            self._lineages[key[0]] -= 1
            if not self._lineages[key[0]]:
                del self._lineages[key[0]]
        if not entry.live:
            self.nbytes -= entry.nbytes
            del self._entries[name]
