"""Which engine samples the next request: one that holds the version, answers, and is least busy.

The ledger says which live engines acknowledged which version; that answer is reused for a second.
An engine that just failed rests for a while, longer each time, and is asked again only after that
or when there is no other. One that is full rests too, but no longer each time: it works.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from domain.errors import EngineBusy, EngineUnavailable
from domain.ids import policy_name
from storage import versions
from storage.database import Ledger
from storage.versions import Route

FRESH_S = 1.0
"""Seconds for which the ledger's answer is reused."""

STICKINESS = 4
"""Requests by which an attempt's own engine may be busier than the idlest before it moves: what it
sampled so far lies in that engine's cache."""

REST_S, LONGEST_REST_S = 0.5, 10.0


@dataclass(slots=True)
class _Engine:
    in_flight: int = 0
    failures: int = 0
    rests_until: float = 0.0


@dataclass(slots=True)
class _Known:
    """What the ledger said about one run."""

    routes: list[Route] = field(default_factory=list)
    asked_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Router:
    """One per process: it counts the requests that this process has at each engine."""

    def __init__(self, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._engines: dict[str, _Engine] = {}
        self._weights: dict[tuple[str, int], str] = {}

    async def resident(self, run: str) -> list[int]:
        """Versions that live engines hold, newest first."""
        return sorted({route.version for route in await self._routes(run)}, reverse=True)

    async def weights_sha256(self, run: str, version: int) -> str:
        """Digest of a version's weights, in hex: what an engine must have sampled with."""
        known = self._weights.get((run, version))
        if known is None:
            found = await self._ledger.run(versions.weights, run, version)
            known = self._weights[run, version] = found.sha256.hex()
        return known

    @asynccontextmanager
    async def engine(
        self, run: str, version: int, *, prefer: str | None = None
    ) -> AsyncIterator[str]:
        """Base URL of an engine for one request, counted until the block ends.

        EngineUnavailable raised inside the block makes that engine rest.

        Raises:
            EngineUnavailable: no live engine holds the version.
        """
        holders = [r.engine for r in await self._routes(run) if r.version == version]
        if not holders:
            raise EngineUnavailable(f"no live engine holds {policy_name(run, version)}")
        url = self._pick(holders, prefer)
        engine = self._engines[url]
        engine.in_flight += 1
        try:
            yield url
            engine.failures = 0
        except EngineBusy:
            engine.rests_until = self._clock() + REST_S
            raise
        except EngineUnavailable:
            engine.failures += 1
            rest = min(REST_S * 2 ** (engine.failures - 1), LONGEST_REST_S)
            engine.rests_until = self._clock() + rest
            self._known.pop(run, None)  # it may have left the fleet: ask again
            raise
        finally:
            engine.in_flight -= 1

    def _pick(self, holders: list[str], prefer: str | None) -> str:
        now = self._clock()
        for url in holders:
            self._engines.setdefault(url, _Engine())
        awake = [url for url in holders if self._engines[url].rests_until <= now]
        if not awake:
            return min(holders, key=lambda url: self._engines[url].rests_until)
        least = min(self._engines[url].in_flight for url in awake)
        if prefer in awake and self._engines[prefer].in_flight <= least + STICKINESS:
            return prefer
        return random.choice([url for url in awake if self._engines[url].in_flight == least])

    async def _routes(self, run: str) -> list[Route]:
        known = self._known.setdefault(run, _Known())
        async with known.lock:
            if self._clock() - known.asked_at > FRESH_S:
                known.routes = await self._ledger.run(versions.routable, run)
                known.asked_at = self._clock()
        return known.routes
