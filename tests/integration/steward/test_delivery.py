"""Commands reach Temporal once, in order, and poison ones hold up nobody."""

import pytest

from activities import namespace, waits
from storage import outbox, runs, versions
from tests.rehearsal import ENGINE, Rehearsal, configuration
from tests.steward_scene import Scene, publish, routes, running, until


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
    await until(lambda: len(routes(scene, 0)) == 1)
    await steward.fleet.stop()
    assert "gone" in caplog.text
    assert "use the rollbook that created the run" in caplog.text


async def test_a_close_reaches_running_groups_and_late_signals_are_done(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: running(scene.run) == 8)
        scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
        await scene.relay.deliver()
        for group in range(4):
            await scene.handle(group).result()
        scene.run.do("UPDATE outbox SET done_at = NULL WHERE kind = 'close_group'")
        assert await scene.relay.deliver() == 4
    assert set(scene.run.states().values()) == {"registered"}
    assert running(scene.run) == 0
