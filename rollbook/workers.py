"""The three kinds of worker process, composed here and drained on SIGTERM.

    workflows   GroupWorkflow, PublishWorkflow, and the ledger steps they run locally
    rollouts    attempts, one task queue per environment
    ledger      engine loads, and a candidate for the steward

No torch in any of them. A worker that Temporal refuses, or whose steward breaks, ends with its
error: its supervisor starts it again. A service that is away is waited for.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities import namespace
from domain import holders, sources
from domain.config import RunConfig
from domain.environments import Source
from domain.messages import LEDGER_QUEUE, WORKFLOW_QUEUE, rollout_queue
from domain.services import Services
from rollbook import collector, temporal
from rollbook.opening import RETRY_S, open_ledger
from storage.database import Ledger

logger = logging.getLogger(__name__)

Kind = Literal["workflows", "rollouts", "ledger"]

THROTTLE = timedelta(seconds=0.5)
"""A cancel rides on a heartbeat, so heartbeats leave at most so far apart."""

GRACE = timedelta(seconds=15)
"""After SIGTERM running activities may end by themselves for so long; below the supervisor's 20 s."""

EXIT_PAUSE_S = 0.5
"""temporalio 1.35 can crash an interpreter that exits right after a worker has shut down."""


SWEEP_GRACE_S = 60.0
"""A start, a close or a heartbeat takes its time: nothing younger is swept."""


async def run_worker(
    kind: Kind,
    services: Services,
    *,
    environments: Sequence[str] = (),
    concurrency: int = 256,
    cache: Path = Path(".rollbook/cache"),
    grace_s: float = SWEEP_GRACE_S,
) -> None:
    """Run one worker until SIGTERM or SIGINT, then drain it.

    Args:
        kind: which of the three.
        services: addresses of Temporal, the ledger, S3 and the engines.
        environments: task queues of a rollout worker, by environment name.
        concurrency: attempts at once in a rollout worker.
        cache: folder in which a rollout worker keeps model folders (tokenizers, no weights).
        grace_s: seconds that the ledger worker's sweep leaves what it finds in disorder to itself.

    Raises:
        SchemaMismatch: the ledger's schema is not this code's.
        RuntimeError: a worker or the steward ended although nobody asked it to.
    """
    collector.spare()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        async with AsyncExitStack() as stack:
            boot = _boot(stack, kind, services, environments, concurrency, cache, grace_s)
            await _run(boot, stopping, kind)
    finally:
        await asyncio.sleep(EXIT_PAUSE_S)


async def run_rollouts(
    source: Source,
    services: Services,
    *,
    environment: str,
    concurrency: int,
    cache: Path,
    stopping: asyncio.Event,
) -> None:
    """Run a rollout worker for a source that exists in this process only, until `stopping` is set.

    Args:
        source: plays every attempt of the environment, whatever the run's configuration names.
        services: as `run_worker`, and the next two.
        environment: task queue, which no other worker must serve.
        concurrency: attempts at once.
        cache: folder of model folders.
        stopping: set it, in this event loop, to drain the worker.
    """
    async with AsyncExitStack() as stack:

        async def boot() -> Parts:
            client = await connect(services)
            ledger = await _open_ledger(services, "rollouts")
            stack.callback(ledger.close)
            return _rollout_parts(
                *(stack, client, ledger, services, [environment], concurrency, cache),
                load_source=lambda _: source,
            )

        await _run(boot(), stopping, "rollouts")


async def _run(boot: "Coroutine[Any, Any, Parts]", stopping: asyncio.Event, kind: Kind) -> None:
    """Boot and serve until told to stop."""
    parts = await _unless(stopping, boot)
    if parts is not None:
        logger.info("%s worker %s is ready", kind, os.getpid())
        await _serve(parts, stopping)


@dataclass(frozen=True)
class Parts:
    """What a process runs."""

    workers: Sequence[Worker]
    companions: Sequence[Coroutine[Any, Any, None]] = ()


async def _boot(
    stack: AsyncExitStack,
    kind: Kind,
    services: Services,
    environments: Sequence[str],
    concurrency: int,
    cache: Path,
    grace_s: float,
) -> Parts:
    """Connect, and compose the worker; what must be closed goes onto the stack."""
    client = await connect(services)
    ledger = await _open_ledger(services, kind)
    stack.callback(ledger.close)
    match kind:
        case "workflows":
            return Parts([workflow_worker(client, ledger)])
        case "ledger":
            return _ledger_parts(stack, client, ledger, services, grace_s)
        case "rollouts":
            return _rollout_parts(stack, client, ledger, services, environments, concurrency, cache)


async def _open_ledger(services: Services, kind: Kind) -> Ledger:
    from activities.attempt import PATIENCE_S

    patience_s = PATIENCE_S if kind == "rollouts" else 0.0  # Temporal repeats the others' steps
    return await open_ledger(services, application=f"rollbook {kind}", patience_s=patience_s)


async def connect(services: Services) -> Client:
    """A client whose namespace and search attributes exist; waits for Temporal to come up."""
    while True:
        try:
            client = await temporal.connect(services)
            await namespace.ensure(client)
        except (RPCError, RuntimeError) as error:  # RuntimeError: nothing listens there
            logger.warning("Temporal at %s: %s", services.temporal_address, error)
            await asyncio.sleep(RETRY_S)
        else:
            return client


def workflow_worker(client: Client, ledger: Ledger) -> Worker:
    """Workflows and their local ledger steps. Unsandboxed: docs/adr says why and what guards it."""
    from activities.ledger import LedgerActivities
    from activities.publish import ServingActivities
    from workflows.group import GroupWorkflow
    from workflows.publish import PublishWorkflow

    steps, serving = LedgerActivities(ledger), ServingActivities(ledger)
    return Worker(
        client,
        task_queue=WORKFLOW_QUEUE,
        workflows=[GroupWorkflow, PublishWorkflow],
        activities=[
            steps.begin_group,
            steps.close_attempt,
            steps.read_attempt,
            steps.finish_group,
            serving.live_engines,
            serving.mark_served,
            serving.publish_refused,
        ],
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_cached_workflows=2_000,
        max_concurrent_workflow_tasks=32,
        max_concurrent_local_activities=64,
        no_remote_activities=True,
        graceful_shutdown_timeout=GRACE,
    )


def _ledger_parts(
    stack: AsyncExitStack, client: Client, ledger: Ledger, services: Services, grace_s: float
) -> Parts:
    from activities.fleet import Fleet
    from activities.garbage import Garbage
    from activities.inference import EngineClient
    from activities.mourning import Mourning
    from activities.publish import EngineActivities
    from activities.relay import Relay
    from activities.steward import Rhythm, Steward, tend_own
    from activities.sweep import Sweep
    from storage.objects import ObjectStore

    engines = EngineClient()
    stack.push_async_callback(engines.aclose)
    fleet = Fleet(ledger, engines, services.engines, only=services.engines_run)
    own = services.engines_run is not None
    steward = Steward(
        database_url=services.database_url,
        ledger=ledger,
        client=client,
        fleet=Fleet(ledger, engines, ()) if own else fleet,
        relay=Relay(ledger, client),
        sweep=Sweep(ledger, client, grace_s=grace_s),
        mourning=Mourning(ledger, client),
        rhythm=Rhythm(sweep=min(Rhythm.sweep, grace_s / 2)),
        garbage=Garbage(ledger, ObjectStore(services)),
    )
    worker = Worker(
        client,
        task_queue=LEDGER_QUEUE,
        activities=[EngineActivities(ledger, engines).load_version],
        max_concurrent_activities=64,
        max_heartbeat_throttle_interval=THROTTLE,
        default_heartbeat_throttle_interval=THROTTLE,
        graceful_shutdown_timeout=timedelta(seconds=2),  # a load is done again elsewhere
    )
    return Parts([worker], [steward.run(), *([tend_own(fleet)] if own else [])])


def _rollout_parts(
    stack: AsyncExitStack,
    client: Client,
    ledger: Ledger,
    services: Services,
    environments: Sequence[str],
    concurrency: int,
    cache: Path,
    *,
    load_source: Callable[[RunConfig], Source] = sources.load,
) -> Parts:
    from activities.album import Album
    from activities.attempt import Attempts
    from activities.inference import EngineClient
    from activities.routing import Router
    from activities.sampler import Sampler
    from activities.setups import Setups
    from storage.objects import ObjectStore

    engines, store = EngineClient(), ObjectStore(services)
    stack.push_async_callback(engines.aclose)
    attempts = Attempts(
        Sampler(ledger, engines, Router(ledger), Album(ledger, store)),
        Setups(ledger, store, cache / "models", load_source=load_source),
        worker=holders.here(),
        gateway=services.gateway,
    )
    workers = [
        Worker(
            client,
            task_queue=rollout_queue(environment),
            activities=[attempts.run_attempt],
            max_concurrent_activities=concurrency,
            max_heartbeat_throttle_interval=THROTTLE,
            default_heartbeat_throttle_interval=THROTTLE,
            graceful_shutdown_timeout=GRACE,
        )
        for environment in environments
    ]
    return Parts(workers)


async def _unless(stopping: asyncio.Event, boot: Coroutine[Any, Any, Parts]) -> Parts | None:
    """What is booted, or None if told to stop before."""
    booting = asyncio.create_task(boot)
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait([booting, told], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if booting.done():
        return booting.result()
    booting.cancel()
    await asyncio.gather(booting, return_exceptions=True)
    return None


async def _serve(parts: Parts, stopping: asyncio.Event) -> None:
    """Until told to stop; a worker or companion that ends by itself is an error."""
    serving = [asyncio.create_task(worker.run()) for worker in parts.workers]
    beside = [asyncio.create_task(companion) for companion in parts.companions]
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait([*serving, *beside, told], return_when=asyncio.FIRST_COMPLETED)
    broken = [task for task in (*serving, *beside) if task.done()]
    for task in (*beside, told):
        task.cancel()
    await asyncio.gather(*beside, told, return_exceptions=True)
    await asyncio.gather(*(worker.shutdown() for worker in parts.workers if worker.is_running))
    await asyncio.gather(*serving, return_exceptions=True)
    for task in broken:
        raise RuntimeError("a part of this worker ended by itself") from task.exception()
