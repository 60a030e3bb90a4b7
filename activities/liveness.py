"""Whether an engine that owes an answer still lives.

**Black holes.** A long answer and a dead engine look alike. While a request waits, the engine's
`/health` is asked every few seconds, once per engine however many requests wait; two failures in a
row, or another incarnation, end the wait with EngineUnavailable.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from activities.connections import Answer
from domain.errors import EngineUnavailable

HEALTH_EVERY_S = 3.0
HEALTH_TIMEOUT_S = 3.0


@dataclass(slots=True)
class _Watch:
    """What is known of one engine, shared by all requests that wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_at: float = -math.inf
    failures: int = 0
    incarnation: int | None = None


class Liveness:
    """Watches the engines that requests of this process wait for."""

    def __init__(self, look: Callable[[str], Awaitable[Answer]]) -> None:
        """`look` asks the `/health` of an engine, or raises EngineUnavailable."""
        self._look = look
        self._watches: dict[str, _Watch] = {}

    async def wait(self, engine_url: str, pending: "asyncio.Task[Any]") -> None:
        """Return when the answer is there.

        Raises:
            EngineUnavailable: the engine died under the request, or was replaced.
        """
        watch = self._watches.setdefault(engine_url, _Watch())
        first: int | None = None
        while not (await asyncio.wait([pending], timeout=HEALTH_EVERY_S))[0]:
            async with watch.lock:
                if time.monotonic() - watch.asked_at >= HEALTH_EVERY_S:
                    await self._ask(engine_url, watch)
            first = watch.incarnation if first is None else first
            if watch.failures >= 2:
                raise EngineUnavailable(
                    f"engine {engine_url} owes an answer and did not answer /health "
                    f"{watch.failures} times in a row"
                )
            if watch.incarnation != first:
                raise EngineUnavailable(f"engine {engine_url} was restarted under a request")

    async def _ask(self, engine_url: str, watch: _Watch) -> None:
        try:
            answer = await self._look(engine_url)
            watch.failures = 0
            if answer.content:  # vLLM's body is empty
                watch.incarnation = json.loads(answer.content).get("incarnation")
        except (EngineUnavailable, ValueError):
            watch.failures += 1
        finally:
            watch.asked_at = time.monotonic()
