"""HTTP to engines: many connections at once, kept open, and cheap.

aiohttp here, because a gateway with hundreds of calls in flight spends most of its time on them: a
call through httpx takes four times the CPU (bench/gateway.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """For people: what is not UTF-8 is replaced."""
        return self.content.decode(errors="replace")


class Connections:
    """An HTTP client for up to `most` requests at once; more wait for a connection."""

    def __init__(self, most: int, *, connect_s: float) -> None:
        """Nothing is connected yet.

        Args:
            most: connections that are open at once.
            connect_s: seconds to connect.
        """
        self._most = most
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Answer:
        """Send a request and read the whole answer, whatever its status.

        Raises:
            aiohttp.ClientError: no connection, or it broke.
            TimeoutError: it took longer than `timeout_s`.
        """
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s)
        async with self._open().request(
            method, url, data=content, headers=headers, timeout=limits
        ) as answer:
            return Answer(status=answer.status, content=await answer.read())

    async def aclose(self) -> None:
        """Close every connection; requests in progress end by that."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        """The session, which can only be made where its loop runs."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._most),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=2**20,
            )
        return self._session
