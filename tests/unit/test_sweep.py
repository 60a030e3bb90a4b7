"""The sweep's rounds: what one item does to the others."""

import psycopg
import pytest

from activities.sweep import each
from domain.errors import LedgerError


async def test_an_item_that_is_refused_is_named_and_the_others_are_settled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settled: list[int] = []

    async def look(item: int) -> None:
        if item == 1:
            raise LedgerError("no such group")
        if item == 2:
            raise psycopg.errors.CheckViolation("illegal")
        settled.append(item)

    await each(range(40), look)
    assert sorted(settled) == [0, *range(3, 40)]
    assert [m for m in caplog.messages if "could not be settled" in m] == [
        "1 could not be settled",
        "2 could not be settled",
    ]


async def test_a_service_that_is_away_ends_the_round() -> None:
    async def look(item: int) -> None:
        raise psycopg.OperationalError("gone")

    with pytest.raises(psycopg.OperationalError):
        await each([1], look)
