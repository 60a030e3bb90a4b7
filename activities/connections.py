"""Many connections at once, cheaply.

An httpx pool looks at all its idle connections, one system call each, whenever a request comes or
goes: with hundreds of them that costs more than the requests. So connections are spread over small
pools, and a request takes the least busy one.
"""

from dataclasses import dataclass

import httpx

WIDTH = 4


@dataclass(slots=True)
class Lane:
    """A small pool, and how many requests it carries."""

    client: httpx.AsyncClient
    busy: int = 0


class Connections:
    """An HTTP client for up to `most` requests at once; more wait for a connection."""

    def __init__(self, most: int, timeout: httpx.Timeout) -> None:
        """Nothing is connected yet; `timeout` holds where a request brings none."""
        self._most = max(1, most // WIDTH)
        self._timeout = timeout
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._lanes: list[Lane] = []

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the whole answer."""
        lane = min(self._lanes, key=lambda lane: lane.busy, default=None)
        if lane is None or (lane.busy >= WIDTH and len(self._lanes) < self._most):
            lane = Lane(self._client())
            self._lanes.append(lane)
        lane.busy += 1
        try:
            return await lane.client.send(request)
        finally:
            lane.busy -= 1

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in self._lanes:
            await lane.client.aclose()

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=WIDTH, max_keepalive_connections=WIDTH)
        return httpx.AsyncClient(
            limits=limits, timeout=self._timeout, trust_env=False, verify=self._tls
        )
