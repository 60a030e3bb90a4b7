"""The engine process: one torch thread, one event loop."""

import logging
import socket
from pathlib import Path

import torch
import uvicorn

from domain.services import Services
from engine.app import create_app
from engine.objects import ObjectSource
from engine.residents import Residents
from engine.scheduler import Scheduler
from engine.weights import Loader, Store
from storage.objects import ObjectStore

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
GRACE_S = 5


class Server(uvicorn.Server):
    """Ends running requests when asked to stop, so that each caller gets his partial answer."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is running, then close the connections."""
        self._scheduler.abort_all()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: as asked, or because nothing would ever be answered again."""
        return await super().on_tick(counter) or not self._scheduler.alive


def serve(
    services: Services,
    *,
    host: str = "127.0.0.1",
    port: int,
    max_resident: int = 4,
    max_batch: int = 64,
    threads: int | None = None,
    cache: Path,
    max_waiting: int = 1024,
    kv_bytes: int = 2 << 30,
    prefix_bytes: int = 512 << 20,
) -> None:
    """Serve until SIGINT or SIGTERM. Starts empty; policies come through `/rollbook/load`.

    Args:
        services: where the object store is.
        host: address to listen on.
        port: port to listen on.
        max_resident: policies held at once.
        max_batch: requests decoded together, over all policies.
        threads: torch threads; default: torch's own choice, the cores.
        cache: folder for model folders and weights on their way into memory.
        max_waiting: requests that wait beyond `max_batch`; more are answered 429.
        kv_bytes: memory for KV of running requests.
        prefix_bytes: memory for retained KV; 0 retains none.

    Raises:
        RuntimeError: the torch thread died of a bug; whoever supervises starts another process.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    source = ObjectSource(ObjectStore(services), cache)
    scheduler = Scheduler(
        max_batch=max_batch, max_waiting=max_waiting, kv_bytes=kv_bytes, prefix_bytes=prefix_bytes
    )
    server = make_server(scheduler, source, host=host, port=port, max_resident=max_resident)
    log.info("engine on http://%s:%d, %d torch threads", host, port, torch.get_num_threads())
    try:
        server.run()
        if not scheduler.alive:
            raise RuntimeError("the engine's torch thread died; its traceback is above")
    finally:
        scheduler.close()


def make_server(
    scheduler: Scheduler, source: Store, *, host: str, port: int, max_resident: int
) -> Server:
    """The server over a scheduler, not started yet."""
    residents = Residents(Loader(source), scheduler, max_resident=max_resident)
    config = uvicorn.Config(
        create_app(scheduler, residents),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    return Server(config, scheduler)
