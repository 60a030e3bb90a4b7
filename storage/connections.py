"""Connections to Postgres on which silence is an error: whoever waits for an answer waits boundedly.

A server that dies closes its connections, and one that vanishes lets the kernel's keepalives run out.
One that is frozen behind a living kernel does neither: packets are acknowledged, and nothing ever
answers. Its own `statement_timeout` is frozen with it, so the client has to watch the clock.
"""

import time
from collections.abc import Generator
from typing import Any, TypeVar, cast

import psycopg
from psycopg.rows import DictRow, TupleRow

T = TypeVar("T")
Waiting = Generator[Any, Any, T]
"""What psycopg drives a connection with: yields what it waits for, is sent what the socket is ready
for, or nothing whenever an interval of a tenth of a second has passed."""

ANSWER_S = 30.0
"""Seconds of silence after which a server is away. Twice `statement_timeout`: one that lives has then
answered, be it with the refusal to go on."""

ALIVE: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
    "options": "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=4 "
    "-c tcp_user_timeout=30s",
}
"""Connection parameters by which either end notices within 30 s that the other one is gone without a
word. The system's defaults take hours: until then a caller would hang, and a dead leader would lead."""


class Watched(psycopg.Connection[DictRow]):
    """A connection that is closed, with an error, once the server has been silent for `ANSWER_S`."""

    def wait(self, gen: Waiting[T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's; every query, COMMIT and COPY passes through here.

        Raises:
            psycopg.OperationalError: the server said nothing for `ANSWER_S` seconds.
        """
        try:
            return super().wait(_answered(gen), *args, **kwargs)
        except Silence:
            self.pgconn.finish()  # whatever still comes belongs to a question that was given up
            raise


class AsyncWatched(psycopg.AsyncConnection[TupleRow]):
    """`Watched`, for an event loop."""

    async def wait(self, gen: Waiting[T], *args: Any, **kwargs: Any) -> T:
        """As `Watched.wait`.

        Raises:
            psycopg.OperationalError: the server said nothing for `ANSWER_S` seconds.
        """
        try:
            return await super().wait(_answered(gen), *args, **kwargs)
        except Silence:
            self.pgconn.finish()
            raise


class Silence(psycopg.OperationalError):
    """The server holds the connection and says nothing: it is frozen, or its disk is."""

    def __init__(self) -> None:
        super().__init__(
            f"the server has not answered for {ANSWER_S:.0f} s on a connection that it holds open: "
            "it is frozen, or its disk is"
        )


def _answered(waiting: Waiting[T]) -> Waiting[T]:
    ready: Any = None
    heard = time.monotonic()
    while True:
        try:
            wanted = waiting.send(ready)
        except StopIteration as end:
            return cast(T, end.value)
        ready = yield wanted
        if ready:
            heard = time.monotonic()
        elif time.monotonic() - heard > ANSWER_S:
            raise Silence
