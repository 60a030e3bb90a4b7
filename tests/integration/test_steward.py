"""The steward on a real ledger and a real Temporal: delivery, loss, engines, leadership.

Played by the test: engines (what an `EngineClient` answers) and rollouts (an activity that makes the
real transactions of an attempt and samples nothing).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest
from temporalio import activity
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities import namespace, waits
from activities.fleet import Fleet
from activities.garbage import Garbage
from activities.inference import Crossing, EngineClient, Health
from activities.ledger import LedgerActivities
from activities.mourning import Mourning
from activities.payloads import MESSAGES
from activities.publish import EngineActivities, ServingActivities
from activities.relay import Relay
from activities.steward import Rhythm, Steward, tend_own
from activities.sweep import Sweep
from domain.errors import EngineRefused, EngineUnavailable
from domain.ids import policy_name, publish_workflow_id
from domain.messages import LEDGER_QUEUE, WORKFLOW_QUEUE, AttemptIn, AttemptRef, rollout_queue
from domain.rollouts import Status
from domain.services import Services
from storage import attempts, housekeeping, outbox, runs, versions
from storage.attempts import Ending
from storage.census import Silent
from storage.census import live_engines as live
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.recording import keep
from tests.rehearsal import ENGINE, Rehearsal, configuration
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


@pytest.fixture(scope="session")
async def client(temporal_address: str) -> AsyncIterator[Client]:
    client = await Client.connect(temporal_address, namespace="rollbook", data_converter=MESSAGES)
    await namespace.ensure(client)
    yield client
    await asyncio.sleep(0.5)  # temporalio 1.35 may crash an interpreter that exits sooner


def staged(
    client: Client, ledger: Ledger, ledger_url: str, store: ObjectStore, **sections: Any
) -> Scene:
    name = f"r{secrets.token_hex(5)}"
    config = configuration(name=name, tasks={"environment": name}, **sections)
    run = Rehearsal(ledger, config, batches=4).begin()
    run.do("UPDATE outbox SET done_at = now()")  # version 0 is served already
    return Scene(client, ledger, ledger_url, run, Engines(), Rollouts(ledger), store)


@pytest.fixture(scope="session")
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


@pytest.fixture
def scene(client: Client, ledger: Ledger, ledger_url: str, store: ObjectStore) -> Scene:
    return staged(client, ledger, ledger_url, store)


async def until(happened: Callable[[], Any], *, seconds: float = 20.0) -> None:
    """Poll the ledger or the engines: what is waited for happens in another process or thread."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_submitted_group_is_started_once_sampled_and_admitted(scene: Scene) -> None:
    scene.run.hand_over()
    scene.rollouts.gate.set()
    async with scene.workers():
        assert await scene.relay.deliver() == 4
        for group in range(4):
            await scene.handle(group).result()
        # The relay died before it could mark them; the groups have ended since.
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'start_group'")
        assert await scene.relay.deliver() == 0
    assert set(scene.run.states().values()) == {"queue"}
    assert scene.run.planned() == [0, 1]
    described = await scene.handle(0).describe()
    assert await described.static_summary() == f"{scene.run.run} · batch 0 · task t0.0 · 2+0"
    assert described.typed_search_attributes[namespace.STAGE] == "complete"


async def test_a_duplicate_start_finds_the_running_workflow(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        first = (await scene.handle(0).describe()).raw_description.workflow_execution_info
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'start_group'")
        assert await scene.relay.deliver() == 4
        again = (await scene.handle(0).describe()).raw_description.workflow_execution_info
        assert again.execution.run_id == first.execution.run_id
        scene.rollouts.gate.set()
        await scene.handle(0).result()


async def test_poison_commands_hold_up_nobody_and_their_groups_start_another_way(
    scene: Scene,
) -> None:
    scene.run.hand_over()
    scene.rollouts.gate.set()
    # What an older version wrote, and what Temporal cannot take.
    scene.run.do("UPDATE outbox SET payload = payload - 'samples' WHERE key LIKE '%%/g0~0'")
    long = "jsonb_build_object('task', repeat('x', 3000000))"
    scene.run.do(f"UPDATE outbox SET payload = payload || {long} WHERE key LIKE '%%/g1~0'")
    async with scene.workers():
        for _ in range(outbox.REFUSALS):
            await scene.relay.deliver()
            scene.run.do("UPDATE outbox SET due_at = now()")
        assert await scene.relay.deliver() == 0
        for group in (2, 3):
            await scene.handle(group).result()
        told = {
            wait.on: wait.detail for wait in await waits.of_run(None, scene.ledger, scene.run.run)
        }
        assert "2 commands were refused again and again and are set aside" in told["steward"]
        rows = scene.run.rows(
            "SELECT last_error FROM outbox WHERE set_aside_at IS NOT NULL ORDER BY key"
        )
        assert "samples" in rows[0]["last_error"]
        assert "exceeds limit" in rows[1]["last_error"]
        await scene.sweep().run()
        assert await scene.relay.deliver() == 2
        for group in (0, 1):
            await scene.handle(group, gen=1).result()
    assert set(scene.run.states().values()) == {"queue"}
    assert [scene.run.group(group)["losses"] for group in range(4)] == [1, 1, 0, 0]


async def test_a_publication_whose_command_is_poison_is_started_by_the_sweep(scene: Scene) -> None:
    publish(scene, 1)
    scene.run.do(
        "UPDATE outbox SET payload = payload || '{\"patience_s\": \"long\"}' WHERE kind = 'publish'"
    )
    for _ in range(outbox.REFUSALS):
        await scene.relay.deliver()
        scene.run.do("UPDATE outbox SET due_at = now()")
    scene.engines.add(ENGINE)
    async with scene.workers():
        await scene.fleet(ENGINE).tend()
        await scene.sweep().run()
        await until(lambda: scene.ledger.call(versions.served, scene.run.run) == 1)


async def test_a_run_of_another_version_does_not_end_the_care_for_the_others(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    old = Rehearsal(scene.ledger, configuration(name=f"{scene.run.run}-old")).begin()
    for _ in range(2):  # so that there is something to retire
        old.train(1)
        old.checkpoint()
    scene.run.do(
        "UPDATE runs SET config = jsonb_set(config, '{run,gone}', '1') WHERE run_id = %s", old.run
    )
    scene.run.hand_over()
    scene.run.do("UPDATE engines SET alive_until = now() WHERE run_id = %s", old.run)
    url = scene.engines.add("http://a")
    scene.run.do("DELETE FROM engines")
    steward = scene.steward(url)
    await steward.fleet.tend()
    await steward.sweep.run()
    await steward.garbage.collect()
    await steward.fleet.retire()
    await until(lambda: len(_routes(scene, 0)) == 1)
    await steward.fleet.stop()
    assert "gone" in caplog.text
    assert "use the rollbook that created the run" in caplog.text


async def test_an_engine_that_lost_a_policy_without_a_restart_loads_it_again(scene: Scene) -> None:
    url = scene.engines.add("http://a")
    fleet = scene.fleet(url)
    scene.run.do("DELETE FROM engines")
    name = policy_name(scene.run.run, 0)
    async with asyncio.timeout(20):
        while not _routes(scene, 0):
            await fleet.tend()
        scene.engines._set(url, {"theirs@3": "x"})  # somebody unloaded it; and another ledger's
        while name not in scene.engines.health_by_url[url].policies:
            await fleet.tend()
            await asyncio.sleep(0)
        while not _routes(scene, 0):
            await fleet.tend()
    await fleet.stop()
    assert scene.engines.loads == [(url, name)] * 2
    assert "theirs@3" in scene.engines.health_by_url[url].policies


async def test_a_close_reaches_running_groups_and_late_signals_are_done(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
        await scene.relay.deliver()
        for group in range(4):
            await scene.handle(group).result()
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'close_group'")
        assert await scene.relay.deliver() == 4
    assert set(scene.run.states().values()) == {"registered"}
    assert _running(scene.run) == 0


async def test_a_terminated_workflow_is_opened_again_and_its_members_stay(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        await scene.handle(1).terminate()
        await scene.sweep().run()
        group = scene.run.group(1)
        assert (group["state"], group["gen"], group["losses"]) == ("submitted", 1, 2)
        assert scene.run.group(0)["gen"] == 0
        scene.rollouts.gate.set()
        await scene.relay.deliver()
        await scene.handle(1, gen=1).result()
        for other in (0, 2, 3):
            await scene.handle(other).result()
    assert set(scene.run.states().values()) == {"queue"}
    failures = scene.run.value("SELECT count(*) FROM attempts WHERE counts_as_failure")
    assert failures == 0


async def test_a_running_group_is_left_alone(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        sweep = scene.sweep(silent_s=0.0)
        for _ in range(3):
            await sweep.run()
        assert _running(scene.run) == 8
        assert scene.run.value("SELECT max(gen) FROM groups") == 0
        scene.rollouts.gate.set()
        for group in range(4):
            await scene.handle(group).result()


async def test_a_stuck_group_is_marked_and_told_why_and_the_mark_goes(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        scene.run.do("UPDATE runs SET stuck_after = interval '1 millisecond'")
        sweep = scene.sweep()
        await sweep.run()

        async def shown() -> tuple[object, str]:
            described = await scene.handle(0).describe()
            details = await scene.handle(0).query("__temporal_workflow_metadata")
            return described.typed_search_attributes.get(namespace.STAGE), str(details)

        async with asyncio.timeout(20):
            while (told := await shown())[0] != "stuck":
                pass  # each look is two round trips
        assert "| stuck | 0 | 0 | v0 | " in told[1]
        assert "**rollout worker**" in told[1]
        events = len((await scene.handle(0).fetch_history()).events)
        await sweep.run()  # nothing new: nothing is sent
        assert len((await scene.handle(0).fetch_history()).events) == events
        scene.run.do("UPDATE runs SET stuck_after = interval '1 hour'")
        await sweep.run()
        async with asyncio.timeout(20):
            while (await shown())[0] != "sampling":
                pass
        scene.rollouts.gate.set()
        for group in range(4):
            await scene.handle(group).result()


async def test_a_group_cancelled_by_a_person_is_cancelled_and_not_sampled_again(
    scene: Scene,
) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        await scene.handle(0).cancel()
        await until(lambda: scene.run.states()[0] == "cancelled")
        await scene.sweep().run()
        scene.rollouts.gate.set()
        for group in range(1, 4):
            await scene.handle(group).result()
    assert scene.run.group(0)["closed_cause"] == "human"
    assert scene.run.group(0)["gen"] == 0


async def test_a_workflow_that_no_group_names_is_closed_when_seen_twice(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: _running(scene.run) == 8)
        scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
        scene.run.do("UPDATE outbox SET done_at = now()")  # as if the signals had been lost
        scene.run.take_over()
        sweep = scene.sweep()
        async with asyncio.timeout(20):
            for group in range(4):
                while await scene.status(group) is WorkflowExecutionStatus.RUNNING:
                    await sweep.run()
    assert _running(scene.run) == 0


async def test_a_cancelled_attempt_whose_workflow_is_gone_has_ended(scene: Scene) -> None:
    scene.run.hand_over()
    scene.run.start(0)
    scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
    assert _running(scene.run) == 2
    await scene.sweep().run()
    assert _running(scene.run) == 0
    assert scene.run.states()[0] == "registered"


async def test_losing_an_attempt_is_a_compare_and_set_on_its_fence(scene: Scene) -> None:
    scene.run.hand_over()
    scene.run.start(0)
    silent = Silent(
        run=scene.run.run, group=0, sample=1, attempt=0, fence=0, workflow_id="run/x/b000000/g0~0"
    )
    assert not scene.ledger.call(housekeeping.lose, silent)
    assert scene.ledger.call(housekeeping.lose, replace(silent, fence=1))
    assert not scene.ledger.call(housekeeping.lose, replace(silent, fence=2))
    assert scene.run.group(0)["losses"] == 1


async def test_a_broken_rule_of_the_ledger_stops_the_run(scene: Scene) -> None:
    scene.run.hand_over()
    scene.run.do("DELETE FROM outbox WHERE kind = 'start_group'")  # groups that nobody will start
    await scene.sweep(grace_s=3600.0).run()
    state = scene.run.now()
    assert state.state == "failed"
    assert "lost_group" in str(state.failure)


async def test_a_version_is_served_once_every_live_engine_holds_it(scene: Scene) -> None:
    urls = [scene.engines.add("http://a"), scene.engines.add("http://b")]
    scene.run.do("DELETE FROM engine_versions")
    scene.run.do("DELETE FROM engines")
    async with scene.workers(), asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(*urls, "http://dead").run())
        publish(scene, 1)
        await until(lambda: scene.ledger.call(versions.served, scene.run.run) == 1)
        name = policy_name(scene.run.run, 1)
        assert {url for url, policy in scene.engines.loads if policy == name} == set(urls)
        publication = scene.client.get_workflow_handle(publish_workflow_id(scene.run.run, 1))
        await publication.result()
        await keep(publication, "publish")
        scene.engines.add(urls[0], incarnation=2)  # it restarts, empty
        await until(lambda: name in scene.engines.health_by_url[urls[0]].policies)
        await until(lambda: len(_routes(scene, 1)) == 2)
        old = policy_name(scene.run.run, 0)
        await until(lambda: old not in scene.engines.health_by_url[urls[1]].policies)
        steward.cancel()


async def test_engines_that_were_started_for_one_run_serve_no_other(scene: Scene) -> None:
    mine, other = scene.engines.add("http://mine"), scene.engines.add("http://other")
    scene.run.do("DELETE FROM engine_versions")
    scene.run.do("DELETE FROM engines")
    strangers = Fleet(scene.ledger, scene.engines, [other], only="another-run")
    own = Fleet(scene.ledger, scene.engines, [mine], only=scene.run.run)
    async with asyncio.TaskGroup() as tasks:  # neither worker leads
        loops = [tasks.create_task(tend_own(fleet, QUICK)) for fleet in (strangers, own)]
        await until(lambda: len(_routes(scene, 0)) == 1)
        for loop in loops:
            loop.cancel()
    assert scene.ledger.call(live, scene.run.run) == [(mine, 1)]
    assert scene.engines.loads == [(mine, policy_name(scene.run.run, 0))]


async def test_an_engine_with_one_slot_swaps(
    client: Client, ledger: Ledger, ledger_url: str, store: ObjectStore
) -> None:
    synchronous = {"ahead": 0, "max_lag": 0}
    scene = staged(client, ledger, ledger_url, store, schedule=synchronous)
    url = scene.engines.add("http://a", max_resident=1)
    scene.run.do("DELETE FROM engine_versions")
    scene.run.do("DELETE FROM engines")
    async with scene.workers(), asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(url).run())
        await until(lambda: len(_routes(scene, 0)) == 1)
        publish(scene, 1)
        await until(lambda: scene.ledger.call(versions.served, scene.run.run) == 1)
        assert list(scene.engines.health_by_url[url].policies) == [policy_name(scene.run.run, 1)]
        steward.cancel()


async def test_a_run_that_has_ended_keeps_its_last_version_for_evaluation(scene: Scene) -> None:
    url = scene.engines.add("http://a")
    fleet = scene.fleet(url)
    scene.run.do("DELETE FROM engines")
    async with asyncio.timeout(20):
        while not _routes(scene, 0):
            await fleet.tend()
    scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "finished")
    scene.run.do("UPDATE engines SET alive_until = now()")
    for _ in range(3):
        await fleet.retire()
        await fleet.tend()
    await fleet.stop()
    assert list(scene.engines.health_by_url[url].policies) == [policy_name(scene.run.run, 0)]
    assert {route.engine for route in _routes(scene, 0)} == {url}


async def test_a_slow_engine_and_one_that_refuses_do_not_hold_up_the_others(scene: Scene) -> None:
    urls = [scene.engines.add(f"http://{name}") for name in ("ready", "slow", "refusing")]
    scene.engines.slow.add("http://slow")
    scene.engines.refusing.add("http://refusing")
    async with scene.workers():
        publish(scene, 1, patience_s=0.2)
        await scene.fleet(*urls).tend()
        scene.run.do("DELETE FROM engines WHERE engine_id = %s", ENGINE)
        await scene.relay.deliver()
        handle = scene.client.get_workflow_handle(publish_workflow_id(scene.run.run, 1))
        out = await handle.result()
        assert out["served"]
        assert out["acknowledged"] == 1
        await keep(handle, "publish_slow_and_refusing")
        assert [route.engine for route in _routes(scene, 1)] == ["http://ready"]


async def test_v12_an_engine_that_lacks_what_the_run_needs_stops_it_before_anything_is_sampled(
    scene: Scene,
) -> None:
    url = scene.engines.add("http://a", max_resident=1)
    scene.run.do("DELETE FROM engine_versions")
    scene.run.do("DELETE FROM engines")
    async with scene.workers(), asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(url).run())
        await until(lambda: url in [e for e, _ in scene.ledger.call(live, scene.run.run)])
        publish(scene, 1)
        await until(lambda: scene.run.now().state == "failed")
        steward.cancel()
    assert "engine http://a cannot sample for run" in str(scene.run.now().failure)
    assert "it holds 1 versions" in str(scene.run.now().failure)
    assert scene.engines.loads == []


async def test_a_version_that_every_engine_refuses_stops_the_run(scene: Scene) -> None:
    url = scene.engines.add("http://a")
    scene.engines.refusing.add(url)
    async with scene.workers():
        publish(scene, 1)
        await scene.fleet(url).tend()
        scene.run.do("DELETE FROM engines WHERE engine_id = %s", ENGINE)
        await scene.relay.deliver()
        handle = scene.client.get_workflow_handle(publish_workflow_id(scene.run.run, 1))
        assert not (await handle.result())["served"]
        await keep(handle, "publish_refused")
    assert "does not like" in str(scene.run.now().failure)


async def test_a_publication_that_went_missing_is_started_again(scene: Scene) -> None:
    publish(scene, 1)
    scene.run.do("UPDATE outbox SET done_at = now() - interval '1 hour' WHERE kind = 'publish'")
    await scene.sweep().run()
    handle = scene.client.get_workflow_handle(publish_workflow_id(scene.run.run, 1))
    assert (await handle.describe()).status is WorkflowExecutionStatus.RUNNING
    await handle.terminate()


async def test_another_steward_leads_when_the_leader_loses_its_lock(scene: Scene) -> None:
    scene.run.hand_over()
    async with asyncio.TaskGroup() as tasks:
        stewards = [tasks.create_task(scene.steward().run()) for _ in range(2)]
        await until(lambda: _undelivered(scene.run) == 0)
        assert len(_holders(scene.url)) == 1
        with psycopg.connect(scene.url, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s)", (_holders(scene.url)[0],))
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'start_group'")
        await until(lambda: _undelivered(scene.run) == 0)
        await until(lambda: len(_holders(scene.url)) == 1)
        for steward in stewards:
            steward.cancel()
    for group in range(4):
        await scene.handle(group).terminate()


async def test_a_wiped_temporal_is_refilled_from_the_ledger(scene: Scene) -> None:
    from temporalio.testing import WorkflowEnvironment  # its server is this test's own

    from rollbook.stack import ports, temporal

    port = ports.choose(0)

    async def serve() -> WorkflowEnvironment:
        return await WorkflowEnvironment.start_local(
            port=port,
            namespace="rollbook",
            data_converter=MESSAGES,
            dev_server_existing_path=str(temporal.binary()),
            dev_server_log_level="error",
        )

    scene.run.hand_over()
    first = await serve()
    async with asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(client=first.client).run())
        async with scene.workers(first.client):
            await until(lambda: _running(scene.run) == 8)
        await first.shutdown()
        second = await serve()
        scene.rollouts.gate.set()
        async with scene.workers(second.client):
            await until(lambda: set(scene.run.states().values()) == {"queue"}, seconds=60)
        steward.cancel()
    await second.shutdown()
    assert scene.run.value("SELECT count(*) FROM attempts WHERE counts_as_failure") == 0


async def test_old_commands_go_and_coming_days_get_partitions(scene: Scene) -> None:
    scene.run.do("UPDATE outbox SET done_at = now() - interval '2 hours'")
    assert scene.ledger.call(outbox.purge, older_s=3600) > 0
    today = datetime.now(UTC).date()
    assert scene.ledger.call(housekeeping.add_event_partitions, today) == 3
    assert scene.ledger.call(housekeeping.add_event_partitions, today) == 0
    # The default partition holds rows of today, so today's would be refused: it is left as it is.
    assert scene.ledger.call(housekeeping.add_event_partitions, today - timedelta(days=1)) == 0
    assert scene.ledger.call(housekeeping.add_event_partitions, date(2031, 5, 6), days=1) == 1


async def test_the_namespace_and_its_search_attributes_are_made_once(temporal_address: str) -> None:
    client = await Client.connect(temporal_address, namespace=f"n{secrets.token_hex(4)}")
    for _ in range(3):
        await _patiently(lambda: namespace.ensure(client))
    listed = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    assert {key.name for key in namespace.SEARCH_ATTRIBUTES} <= set(listed.custom_attributes)


async def _patiently(step: Callable[[], Any]) -> None:
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


def _running(run: Rehearsal) -> int:
    return int(run.value("SELECT count(*) FROM attempts WHERE state = 'running'"))


def _undelivered(run: Rehearsal) -> int:
    return int(run.value("SELECT count(*) FROM outbox WHERE done_at IS NULL"))


def _routes(scene: Scene, version: int) -> list[versions.Route]:
    found = scene.ledger.call(versions.routable, scene.run.run)
    return [route for route in found if route.version == version]


def _holders(url: str) -> list[int]:
    with psycopg.connect(url, autocommit=True) as admin:
        rows = admin.execute(
            "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
            "WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database()"
        ).fetchall()
    return [row[0] for row in rows]
