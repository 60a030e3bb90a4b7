"""Awaiting what a cancel must not tear: ledger writes whose answer decides what happened."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Await to the end whatever happens; also says whether the caller was cancelled meanwhile.

    Whoever gets True must stop: the cancel was held back, not withdrawn. For writes whose own time
    is bounded, as the ledger's are by its patience.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled
