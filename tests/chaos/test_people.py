"""People do in Temporal's UI what people do: cancel, terminate, reset and pause."""

import asyncio
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import (
    PauseActivityRequest,
    ResetWorkflowExecutionRequest,
    UnpauseActivityRequest,
)
from temporalio.client import WorkflowExecutionStatus

from activities import waits
from domain.waits import Wait
from tests.chaos.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("deed", ["cancel", "terminate", "reset"])
def test_a_person_interferes_with_a_group(stage: Stage, deed: str) -> None:
    stage.until_full_work()
    (row,) = stage.query(
        "SELECT group_id, workflow_id FROM groups WHERE run_id = %s AND state = 'submitted' "
        "AND begun_at IS NOT NULL ORDER BY group_id LIMIT 1",
        stage.run,
    )
    asyncio.run(interfere(stage, row["workflow_id"], deed))
    stage.pause(0.02)
    stage.finish()
    stage.check()
    (group,) = stage.query(
        "SELECT state, closed_cause, gen, losses FROM groups WHERE run_id = %s AND group_id = %s",
        stage.run,
        row["group_id"],
    )
    if deed == "cancel":
        assert (group["state"], group["closed_cause"]) == ("cancelled", "human")
    else:
        assert group["state"] == "complete"
    if deed == "terminate":
        assert group["gen"] == 1


def test_an_attempt_that_a_person_pauses_rests_and_goes_on(stage: Stage) -> None:
    stage.until_full_work()
    stage.pause(15.0)  # a tool that is slower than a pause takes to arrive
    stage.rest(1.5)
    (row,) = stage.query(
        "SELECT g.workflow_id, a.group_id, a.sample, a.attempt FROM attempts a JOIN groups g "
        "USING (run_id, group_id) WHERE a.run_id = %s AND a.state = 'running' AND "
        "a.policy_tokens > 0 ORDER BY a.group_id DESC LIMIT 1",
        stage.run,
    )
    place = (row["group_id"], row["sample"], row["attempt"])
    asyncio.run(pause_attempt(stage, row["workflow_id"], f"s{place[1]}.a{place[2]}", rest=True))

    async def told() -> list[Wait]:
        return await waits.of_attempts(
            await stage.client(), stage.ledger, stage.run, silent_s=0.5, group=place[0]
        )

    def paused() -> bool:
        return ("paused", place[1]) in [(w.on, w.sample) for w in asyncio.run(told())]

    stage.until(paused, "it is told what the attempt waits for")
    fence = "SELECT fence FROM attempts WHERE run_id = %s AND (group_id, sample, attempt) = (%s, %s, %s)"
    before = stage.value(fence, stage.run, *place)
    stage.rest(3)
    assert stage.value(fence, stage.run, *place) == before  # nobody took it up
    asyncio.run(pause_attempt(stage, row["workflow_id"], f"s{place[1]}.a{place[2]}", rest=False))
    stage.pause(0.02)
    stage.finish()
    stage.check()
    ended = "SELECT member FROM attempts WHERE run_id = %s AND (group_id, sample, attempt) = (%s, %s, %s)"
    assert stage.value(ended, stage.run, *place)  # that very attempt, from where it stood


async def pause_attempt(stage: Stage, workflow_id: str, activity: str, *, rest: bool) -> None:
    client = await stage.client()
    place: dict[str, Any] = {
        "namespace": client.namespace,
        "execution": WorkflowExecution(workflow_id=workflow_id),
        "id": activity,
    }
    service = client.workflow_service
    if rest:
        await service.pause_activity(PauseActivityRequest(**place))
    else:
        await service.unpause_activity(UnpauseActivityRequest(**place))


async def interfere(stage: Stage, workflow_id: str, deed: str) -> None:
    client = await stage.client()
    handle = client.get_workflow_handle(workflow_id)
    if deed == "cancel":
        await handle.cancel()
    elif deed == "terminate":
        await handle.terminate("somebody thought it hung")
    else:
        await client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=client.namespace,
                workflow_execution=WorkflowExecution(workflow_id=workflow_id),
                reason="somebody thought it hung",
                request_id=stage.run,
                workflow_task_finish_event_id=4,
            )
        )
    assert (await handle.describe()).status is not WorkflowExecutionStatus.FAILED
