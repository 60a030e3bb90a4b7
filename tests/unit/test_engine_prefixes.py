"""Retained KV is found by what computed it and by what it is of, and by nothing else."""

import pytest
import torch

from engine.prefixes import BLOCK, Lineage, Prefixes, chain

IDS = list(range(3 * BLOCK + 5))
PURE = Lineage("r", 3, 3)


def kv(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 1, blocks * BLOCK, 4), torch.zeros(2, 1, blocks * BLOCK, 4)


SIZE = 2 * 2 * BLOCK * 4 * 4


@pytest.fixture
def store() -> Prefixes:
    store = Prefixes(limit=8 * SIZE)
    store.keep(PURE, chain("s", IDS), *kv(3))
    return store


def tokens(
    store: Prefixes, ids: list[int], version: int = 3, stale: int = 0, salt: str = "s"
) -> int:
    hit = store.find("r", version, stale, chain(salt, ids))
    return hit.tokens if hit else 0


def test_the_longest_common_start_is_found_in_whole_blocks(store: Prefixes) -> None:
    assert tokens(store, IDS) == 3 * BLOCK
    assert tokens(store, IDS[: 2 * BLOCK + 3]) == 2 * BLOCK
    assert tokens(store, [*IDS[: BLOCK + 1], 999, *IDS[BLOCK + 2 :]]) == BLOCK
    assert tokens(store, [999, *IDS[1:]]) == 0


def test_salts_and_versions_never_share(store: Prefixes) -> None:
    assert tokens(store, IDS, salt="t") == 0
    assert tokens(store, IDS, version=4) == 0
    assert tokens(store, IDS, version=2, stale=5) == 0  # newer weights are never old KV
    assert store.find("other", 3, 0, chain("s", IDS)) is None
    assert store.find("other", 4, 1, chain("s", IDS)) is None  # nor does a bound let runs share


def test_older_kv_is_extended_only_within_the_bound(store: Prefixes) -> None:
    assert tokens(store, IDS, version=4, stale=1) == 3 * BLOCK
    assert tokens(store, IDS, version=5, stale=1) == 0
    mixed = Lineage("r", 3, 4)
    store.keep(mixed, chain("s", list(range(5 * BLOCK))), *kv(5))
    longer = list(range(5 * BLOCK))
    assert tokens(store, longer, version=3) == 3 * BLOCK  # mixed KV is not version 3's own
    assert tokens(store, longer, version=4) == 0
    assert tokens(store, longer, version=4, stale=1) == 5 * BLOCK
    assert tokens(store, longer, version=5, stale=1) == 0


def test_a_longer_sequence_replaces_its_start(store: Prefixes) -> None:
    longer = [*IDS[: 3 * BLOCK], *range(500, 500 + BLOCK)]
    store.keep(PURE, chain("s", longer), *kv(4))
    assert store.nbytes == 4 * SIZE
    assert tokens(store, IDS) == 3 * BLOCK


def test_the_least_recently_used_goes_first(store: Prefixes) -> None:
    store.keep(PURE, chain("s", list(range(1000, 1000 + 3 * BLOCK))), *kv(3))
    assert tokens(store, IDS) == 3 * BLOCK
    store.keep(PURE, chain("s", list(range(2000, 2000 + 3 * BLOCK))), *kv(3))
    assert tokens(store, IDS) == 3 * BLOCK
    assert tokens(store, list(range(1000, 1000 + 3 * BLOCK))) == 0
    assert store.nbytes <= store.limit


def test_what_a_gone_version_computed_is_dropped(store: Prefixes) -> None:
    store.drop("r", 3)
    assert store.nbytes == 0
    assert tokens(store, IDS) == 0
