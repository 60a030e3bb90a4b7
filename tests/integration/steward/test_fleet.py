"""Engines hold what runs need, and versions are served when they do."""

import asyncio
from dataclasses import replace

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from activities.fleet import Fleet
from activities.steward import tend_own
from domain.ids import policy_name, publish_workflow_id
from storage import runs, versions
from storage.census import live_engines as live
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.recording import keep
from tests.rehearsal import ENGINE, Rehearsal, configuration
from tests.steward_scene import (
    QUICK,
    Scene,
    publish,
    routes,
    staged,
    until,
)


async def test_an_engine_that_lost_a_policy_without_a_restart_loads_it_again(scene: Scene) -> None:
    url = scene.engines.add("http://a")
    fleet = scene.fleet(url)
    scene.run.do("DELETE FROM engines")
    name = policy_name(scene.run.run, 0)
    async with asyncio.timeout(20):
        while not routes(scene, 0):
            await fleet.tend()
        scene.engines._set(url, {"theirs@3": "x"})  # somebody unloaded it; and another ledger's
        while name not in scene.engines.health_by_url[url].policies:
            await fleet.tend()
            await asyncio.sleep(0)
        while not routes(scene, 0):
            await fleet.tend()
    await fleet.stop()
    assert scene.engines.loads == [(url, name)] * 2
    assert "theirs@3" in scene.engines.health_by_url[url].policies


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
        await until(lambda: len(routes(scene, 1)) == 2)
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
        await until(lambda: len(routes(scene, 0)) == 1)
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
        await until(lambda: len(routes(scene, 0)) == 1)
        publish(scene, 1)
        await until(lambda: scene.ledger.call(versions.served, scene.run.run) == 1)
        assert list(scene.engines.health_by_url[url].policies) == [policy_name(scene.run.run, 1)]
        steward.cancel()


async def test_what_another_run_evaluates_yields_its_slot(scene: Scene) -> None:
    evaluation = {"dataset": "m:held_out", "every": 2}
    other = Rehearsal(scene.ledger, configuration(name="other", evaluation=evaluation)).begin()
    other.train(2)
    other.do("INSERT INTO evaluation_pins(run_id, version) VALUES ('other', 1)")
    url = scene.engines.add("http://a", max_resident=2)
    fleet = scene.fleet(url)
    held = {policy_name("other", version): "sha" for version in (1, 2)}
    scene.engines.health_by_url[url] = replace(scene.engines.health_by_url[url], policies=held)
    scene.run.do("DELETE FROM engines")
    async with asyncio.timeout(20):
        while not routes(scene, 0):
            await fleet.tend()
    await fleet.stop()
    mine = policy_name(scene.run.run, 0)
    assert {*scene.engines.health_by_url[url].policies} == {policy_name("other", 2), mine}
    assert scene.run.rows("SELECT * FROM evaluation_pins") == []


async def test_a_run_that_has_ended_keeps_its_last_version_for_evaluation(scene: Scene) -> None:
    url = scene.engines.add("http://a")
    fleet = scene.fleet(url)
    scene.run.do("DELETE FROM engines")
    async with asyncio.timeout(20):
        while not routes(scene, 0):
            await fleet.tend()
    scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "finished")
    scene.run.do("UPDATE engines SET alive_until = now()")
    for _ in range(3):
        await fleet.retire()
        await fleet.tend()
    await fleet.stop()
    assert list(scene.engines.health_by_url[url].policies) == [policy_name(scene.run.run, 0)]
    assert {route.engine for route in routes(scene, 0)} == {url}


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
        assert [route.engine for route in routes(scene, 1)] == ["http://ready"]


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


async def test_an_engine_that_dies_while_it_downloads_holds_up_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.fleet.ALIVE_S", 1.0)
    living, dying = scene.engines.add("http://living"), scene.engines.add("http://dying")
    scene.run.do("DELETE FROM engine_versions")
    scene.run.do("DELETE FROM engines")
    async with scene.workers(), asyncio.TaskGroup() as tasks:
        steward = tasks.create_task(scene.steward(living, dying).run())
        await until(lambda: len(routes(scene, 0)) == 2)
        scene.engines.slow.add(dying)
        publish(scene, 1)
        await until(lambda: (dying, policy_name(scene.run.run, 1)) in scene.engines.loads)
        assert scene.ledger.call(versions.served, scene.run.run) == 0
        del scene.engines.health_by_url[dying]  # kill -9; its load never answers
        await until(lambda: scene.ledger.call(versions.served, scene.run.run) == 1)
        assert [route.engine for route in routes(scene, 1)] == [living]
        assert [engine for engine, _ in scene.ledger.call(live, scene.run.run)] == [living]
        steward.cancel()
