"""A steward and what it tends: engines and rollouts are played, everything else is real."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psycopg
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.fleet import Fleet
from activities.garbage import Garbage
from activities.inference import Crossing, EngineClient, Health
from activities.ledger import LedgerActivities
from activities.mourning import Mourning
from activities.publish import EngineActivities, ServingActivities
from activities.relay import Relay
from activities.steward import Rhythm, Steward
from activities.sweep import Sweep
from domain.errors import EngineRefused, EngineUnavailable
from domain.messages import LEDGER_QUEUE, WORKFLOW_QUEUE, AttemptIn, AttemptRef, rollout_queue
from domain.rollouts import Status
from storage import attempts, versions
from storage.attempts import Ending
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.rehearsal import Rehearsal, configuration
from workflows.group import GroupWorkflow
from workflows.publish import PublishWorkflow

QUICK = Rhythm(candidate=0.2, fleet=0.1, retirement=0.3, sweep=0.3, namespace=0.5, relay_max=0.05)


@dataclass
class Engines(EngineClient):
    """Engines by base URL that hold what they were told to load."""

    health_by_url: dict[str, Health] = field(default_factory=dict)
    refusing: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    loads: list[tuple[str, str]] = field(default_factory=list)

    def add(self, url: str, *, incarnation: int = 1, max_resident: int = 8) -> str:
        self.health_by_url[url] = Health(
            incarnation=incarnation, max_resident=max_resident, policies={}, running=0, waiting=0
        )
        return url

    async def health(self, engine_url: str) -> Health:
        if engine_url not in self.health_by_url:
            raise EngineUnavailable(f"engine {engine_url} is gone")
        return self.health_by_url[engine_url]

    async def load(
        self,
        engine_url: str,
        policy: str,
        manifest: str,
        sha256: str,
        *,
        crossing: Crossing | None = None,
    ) -> int:
        self.loads.append((engine_url, policy))
        if engine_url in self.slow:
            await asyncio.sleep(3600)
        if engine_url in self.refusing:
            raise EngineRefused(f"engine {engine_url} does not like {policy}")
        health = await self.health(engine_url)
        if len(health.policies) >= health.max_resident and policy not in health.policies:
            raise EngineUnavailable(f"engine {engine_url} has no free slot")
        self._set(engine_url, {**health.policies, policy: sha256})
        return health.incarnation

    async def unload(self, engine_url: str, policy: str) -> None:
        held = (await self.health(engine_url)).policies
        self._set(engine_url, {name: sha for name, sha in held.items() if name != policy})

    def _set(self, url: str, policies: dict[str, str]) -> None:
        self.health_by_url[url] = replace(self.health_by_url[url], policies=policies)


@dataclass
class Rollouts:
    """Plays the rollout worker. While `gate` is clear, attempts wait after their start."""

    ledger: Ledger
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    @activity.defn
    async def run_attempt(self, which: AttemptIn) -> AttemptRef:
        started = await self.ledger.run(attempts.start, which, worker="test")
        if started.ended is not None:
            return started.ended
        ending = Ending(status=Status.COMPLETED, reward=1.0)
        try:
            while not self.gate.is_set():
                activity.heartbeat()
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            # As the real attempt: one whose workflow is gone writes no end; the sweep does.
            details = activity.cancellation_details()
            if details is not None and details.cancel_requested:
                ending = Ending(status=Status.CANCELLED)
                await self.ledger.run(attempts.finish, which, started.fence, ending)
            raise
        return await self.ledger.run(attempts.finish, which, started.fence, ending)


@dataclass
class Scene:
    """A run, its workers and the parts of a steward."""

    client: Client
    ledger: Ledger
    url: str
    run: Rehearsal
    engines: Engines
    rollouts: Rollouts
    store: ObjectStore

    @property
    def relay(self) -> Relay:
        return Relay(self.ledger, self.client)

    def sweep(self, *, grace_s: float = 0.0, silent_s: float = 60.0) -> Sweep:
        return Sweep(self.ledger, self.client, grace_s=grace_s, silent_s=silent_s)

    def fleet(self, *urls: str) -> Fleet:
        return Fleet(self.ledger, self.engines, urls)

    def steward(self, *urls: str, client: Client | None = None) -> Steward:
        client = client or self.client
        return Steward(
            database_url=self.url,
            ledger=self.ledger,
            client=client,
            fleet=self.fleet(*urls),
            relay=Relay(self.ledger, client),
            sweep=Sweep(self.ledger, client, grace_s=0.5),
            garbage=Garbage(self.ledger, self.store),
            mourning=Mourning(self.ledger, client),
            rhythm=QUICK,
        )

    def handle(self, group: int, gen: int = 0) -> WorkflowHandle[Any, Any]:
        batch = self.run.group(group)["batch"]
        return self.client.get_workflow_handle(f"run/{self.run.run}/b{batch:06d}/g{group}~{gen}")

    async def status(self, group: int, gen: int = 0) -> WorkflowExecutionStatus | None:
        return (await self.handle(group, gen).describe()).status

    @asynccontextmanager
    async def workers(self, client: Client | None = None) -> AsyncIterator[None]:
        """All three kinds."""
        client = client or self.client
        throttle = timedelta(milliseconds=100)
        steps, serving = LedgerActivities(self.ledger), ServingActivities(self.ledger)
        engines = EngineActivities(self.ledger, self.engines)
        async with AsyncExitStack() as stack:
            for worker in (
                Worker(
                    client,
                    task_queue=WORKFLOW_QUEUE,
                    workflows=[GroupWorkflow, PublishWorkflow],
                    workflow_runner=UnsandboxedWorkflowRunner(),
                    activities=[
                        steps.begin_group,
                        steps.close_attempt,
                        steps.read_attempt,
                        steps.finish_group,
                        serving.live_engines,
                        serving.mark_served,
                        serving.publish_refused,
                    ],
                ),
                Worker(client, task_queue=LEDGER_QUEUE, activities=[engines.load_version]),
                Worker(
                    client,
                    task_queue=rollout_queue(self.run.config.tasks.environment),
                    activities=[self.rollouts.run_attempt],
                    max_heartbeat_throttle_interval=throttle,
                    default_heartbeat_throttle_interval=throttle,
                ),
            ):
                await stack.enter_async_context(worker)
            yield


def staged(
    client: Client, ledger: Ledger, ledger_url: str, store: ObjectStore, **sections: Any
) -> Scene:
    name = f"r{secrets.token_hex(5)}"
    config = configuration(name=name, tasks={"environment": name}, **sections)
    run = Rehearsal(ledger, config, batches=4).begin()
    run.do("UPDATE outbox SET done_at = now()")  # version 0 is served already
    return Scene(client, ledger, ledger_url, run, Engines(), Rollouts(ledger), store)


async def until(happened: Callable[[], Any], *, seconds: float = 20.0) -> None:
    """Poll the ledger or the engines: what is waited for happens in another process or thread."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def patiently(step: Callable[[], Any]) -> None:
    """A new namespace is known to all of the server only after a moment."""
    async with asyncio.timeout(30):
        while True:
            try:
                await step()
            except RPCError:
                await asyncio.sleep(0.2)
            else:
                return


def publish(scene: Scene, version: int, *, patience_s: float = 60.0) -> None:
    """What the trainer does after an update: a computed version, uploaded and on its way."""
    run = scene.run
    run.batches = 1
    run.hand_over()
    for group in (0, 1):
        run.complete(group)
    run.planned()
    assert run.apply() == version
    scene.ledger.call(
        versions.record_weights,
        run.run,
        run.epoch,
        version,
        manifest_key=f"weights/{run.run}/{version}/x/manifest.json",
        bytes=1,
        probe=None,
    )
    assert scene.ledger.call(versions.publish, run.run, run.epoch, version)
    run.do(
        "UPDATE outbox SET payload = payload || jsonb_build_object('patience_s', %s::float) "
        "WHERE kind = 'publish'",
        patience_s,
    )


def running(run: Rehearsal) -> int:
    return int(run.value("SELECT count(*) FROM attempts WHERE state = 'running'"))


def undelivered(run: Rehearsal) -> int:
    return int(run.value("SELECT count(*) FROM outbox WHERE done_at IS NULL"))


def routes(scene: Scene, version: int) -> list[versions.Route]:
    found = scene.ledger.call(versions.routable, scene.run.run)
    return [route for route in found if route.version == version]


def holders(url: str) -> list[int]:
    with psycopg.connect(url, autocommit=True) as admin:
        rows = admin.execute(
            "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
            "WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()"
        ).fetchall()
    return [row[0] for row in rows]
