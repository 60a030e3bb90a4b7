"""The front's process: one event loop, and the vLLM server beside it."""

import logging
from collections.abc import Mapping
from pathlib import Path

import uvicorn

from domain.capabilities import of_vllm
from domain.services import Services
from engine.vllm.command import Settings
from engine.vllm.front import create_app
from engine.vllm.residents import Residents
from engine.vllm.server import AttachedServer, OwnServer, Server
from engine.vllm.sets import ObjectSource, Source
from engine.vllm.strategies import Adapters, InPlace, Strategy
from storage.objects import ObjectStore

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 75
GRACE_S = 5


def serve(
    services: Services,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int,
    cache: Path,
    environ: Mapping[str, str],
    attach: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Starts empty; the first `/rollbook/load` starts vLLM.

    Args:
        services: where the object store is.
        settings: of the vLLM server.
        host: address to listen on.
        port: port to listen on.
        cache: folder for weights; an attached server must see it under the same path.
        environ: the server's environment, before what rollbook adds.
        attach: base URL of a server that somebody else keeps.

    Raises:
        ConfigError: there is no vLLM to start.
    """
    work = cache.resolve() / "vllm" / f"{host}-{port}"
    server: Server = (
        OwnServer(settings, environ, work / "vllm.log")
        if attach is None
        else AttachedServer(attach, settings)
    )
    source = ObjectSource(ObjectStore(services), work)
    make_server(settings, server, source, work, host=host, port=port).run()


def make_server(
    settings: Settings, server: Server, source: Source, work: Path, *, host: str, port: int
) -> uvicorn.Server:
    """The front over a vLLM server, not started yet."""
    strategy: Strategy = (
        Adapters(server, source, work, max_resident=settings.adapters, rank=settings.lora_rank)
        if settings.adapters
        else InPlace(server, source, work)
    )
    strategy.reset()
    residents = Residents(
        strategy,
        server,
        source,
        most=settings.max_batch + settings.max_waiting,
        capabilities=of_vllm(
            adapters=settings.adapters > 0,
            kept_sets=settings.sampling_masks,
            images=settings.images > 0,
        ),
    )
    log.info(
        "front of vLLM on http://%s:%d, %d versions at once", host, port, strategy.max_resident
    )
    return uvicorn.Server(
        uvicorn.Config(
            create_app(residents, server),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
