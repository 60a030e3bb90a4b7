"""The gateway process: one event loop, the ledger, and the engines; no torch, no Temporal."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import uvicorn

from activities.album import Album
from activities.gateway import Gateway
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.sessions import LedgerBook, Sessions
from activities.setups import Formats
from domain.services import Services
from rollbook import collector
from rollbook.opening import open_ledger
from storage.objects import ObjectStore

logger = logging.getLogger(__name__)

GRACE_S = 15
"""Seconds that running calls get after SIGTERM; what they had sampled is recorded all the same."""

KEEP_ALIVE_S = 75
PATIENCE_S = 30.0
"""Seconds for which a write is tried again while the ledger is away; then clients are told to."""


async def serve(services: Services, *, host: str, port: int, cache: Path) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        services: addresses of the ledger, S3 and the engines.
        host: address to listen on.
        port: port to listen on.
        cache: folder in which model folders are kept (tokenizers, no weights).

    Raises:
        SchemaMismatch: the ledger's schema is not this code's.
    """
    async with AsyncExitStack() as stack:
        ledger = await open_ledger(services, application="rollbook gateway", patience_s=PATIENCE_S)
        stack.callback(ledger.close)
        engines = EngineClient()
        stack.push_async_callback(engines.aclose)
        store = ObjectStore(services)
        sampler = Sampler(ledger, engines, Router(ledger), Album(ledger, store))
        formats = Formats(ledger, store, cache / "models")
        server = make_server(Gateway(Sessions(LedgerBook(sampler, formats))), host=host, port=port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        logger.info("gateway on http://%s:%d", host, port)
        collector.spare()
        await server.serve()


class Server(uvicorn.Server):
    """Stops when it is told to; whoever runs it decides about signals, and ends by returning."""

    def stop(self) -> None:
        """Take no more calls, and return from `serve` when the running ones have ended."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again, before anything is closed."""
        yield


def make_server(gateway: Gateway, *, host: str, port: int) -> Server:
    """The server over a gateway, not started yet."""
    config = uvicorn.Config(
        gateway.app(),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config)
