"""What was lost, stuck or cancelled behind the ledger's back is set right."""

import asyncio
from contextlib import suppress
from dataclasses import replace

from temporalio import workflow
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities import namespace
from domain.messages import WORKFLOW_QUEUE, GroupIn
from storage import housekeeping, runs
from storage.census import Silent
from tests.current_details import readable
from tests.steward_scene import (
    Scene,
    running,
    until,
)


async def test_a_terminated_workflow_is_opened_again_and_its_members_stay(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: running(scene.run) == 8)
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
        await until(lambda: running(scene.run) == 8)
        sweep = scene.sweep(silent_s=0.0)
        for _ in range(3):
            await sweep.run()
        assert running(scene.run) == 8
        assert scene.run.value("SELECT max(gen) FROM groups") == 0
        scene.rollouts.gate.set()
        for group in range(4):
            await scene.handle(group).result()


async def test_a_stuck_group_is_marked_and_told_why_and_the_mark_goes(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: running(scene.run) == 8)
        scene.run.do("UPDATE runs SET stuck_after = interval '1 millisecond'")
        sweep = scene.sweep()
        await sweep.run()

        async def shown() -> tuple[object, str]:
            described = await scene.handle(0).describe()
            details = await scene.handle(0).query("__temporal_workflow_metadata")
            return described.typed_search_attributes.get(namespace.STAGE), readable(details)

        async with asyncio.timeout(20):
            while (told := await shown())[0] != "stuck":
                pass  # each look is two round trips
        assert "| s0.a0 | stuck | 0 | 0 | v0 | " in told[1]
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
        await until(lambda: running(scene.run) == 8)
        await scene.handle(0).cancel()
        await until(lambda: scene.run.states()[0] == "cancelled")
        await scene.sweep().run()
        scene.rollouts.gate.set()
        for group in range(1, 4):
            await scene.handle(group).result()
    assert scene.run.group(0)["closed_cause"] == "human"
    assert scene.run.group(0)["gen"] == 0


@workflow.defn(name="GroupWorkflow", sandboxed=False)
class Unaware:
    """Ends when it is cancelled, without a word to the ledger."""

    @workflow.run
    async def run(self, group: GroupIn) -> None:
        await workflow.sleep(3600)


async def test_a_cancel_that_the_ledger_was_not_told_of_is_found_by_the_sweep(scene: Scene) -> None:
    scene.run.hand_over()
    runner = UnsandboxedWorkflowRunner()
    queue = WORKFLOW_QUEUE
    async with Worker(scene.client, task_queue=queue, workflows=[Unaware], workflow_runner=runner):
        await scene.relay.deliver()
        await scene.handle(0).cancel()
        with suppress(WorkflowFailureError):
            await scene.handle(0).result()
        assert await scene.status(0) is WorkflowExecutionStatus.CANCELED
        await scene.sweep().run()
        for group in range(1, 4):
            await scene.handle(group).terminate()
    found = scene.run.group(0)
    assert (found["state"], found["closed_cause"], found["gen"]) == ("cancelled", "human", 0)
    assert scene.run.states()[1] == "submitted"


async def test_a_workflow_that_no_group_names_is_closed_when_seen_twice(scene: Scene) -> None:
    scene.run.hand_over()
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: running(scene.run) == 8)
        scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
        scene.run.do("UPDATE outbox SET done_at = now()")  # as if the signals had been lost
        scene.run.take_over()
        sweep = scene.sweep()
        async with asyncio.timeout(20):
            for group in range(4):
                while await scene.status(group) is WorkflowExecutionStatus.RUNNING:
                    await sweep.run()
    assert running(scene.run) == 0


async def test_a_cancelled_attempt_whose_workflow_is_gone_has_ended(scene: Scene) -> None:
    scene.run.hand_over()
    scene.run.start(0)
    scene.ledger.call(runs.close, scene.run.run, scene.run.epoch, "closed")
    assert running(scene.run) == 2
    await scene.sweep().run()
    assert running(scene.run) == 0
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
