"""Asks the ledger and Temporal what a run and its silent rollouts wait for; `domain.waits` judges.

The ledger alone tells what is not delivered, not served, not trained; Temporal tells who polls and
what each execution last said of itself. Without Temporal the ledger's half is still answered.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities import relay
from domain import waits
from domain.messages import LEDGER_QUEUE, WORKFLOW_QUEUE, rollout_queue
from domain.waits import PART_S, Activity, Queue, Wait, Workflow
from storage import idle
from storage.database import Ledger
from storage.idle import Idle, Parts, ShareOfStep

CONCURRENT = 16

LOOKED_AT = 64
"""Attempts that are looked at to see whether any worker is alive."""

_STATES = {
    PendingActivityState.PENDING_ACTIVITY_STATE_STARTED: "started",
    PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED: "cancelling",
    PendingActivityState.PENDING_ACTIVITY_STATE_PAUSE_REQUESTED: "paused",
    PendingActivityState.PENDING_ACTIVITY_STATE_PAUSED: "paused",
}


async def of_attempts(
    client: Client | None,
    ledger: Ledger,
    run: str,
    *,
    silent_s: float | None = None,
    group: int | None = None,
) -> list[Wait]:
    """What each attempt waits for that made no progress for `silent_s` seconds, longest first."""
    found = await ledger.run(idle.attempts, run, silent_s=silent_s, group=group)
    parts = await ledger.run(idle.parts, run)
    workflows = await _workflows(client, found)
    queue = await polled(client, rollout_queue(parts.environment)) if found else None
    running = parts.moving + sum(each.heard for each in _executions(found, workflows))
    return [_of_attempt(each, workflows[each.workflow_id], queue, running) for each in found]


async def of_run(client: Client | None, ledger: Ledger, run: str) -> list[Wait]:
    """What the run as a whole waits for: missing parts first, then its trainer."""
    parts = await ledger.run(idle.parts, run)
    shares = await ledger.run(idle.shares, run)
    told = [
        *_steward(parts),
        *await _workers(client, ledger, parts, run),
        *_engines(parts),
        *_publish(parts),
        *_trainer(parts, shares),
    ]
    return [Wait(what="run", on=on, detail=detail, seconds=s) for on, detail, s in told]


async def polled(client: Client | None, name: str) -> Queue | None:
    """Who polls a task queue; None: Temporal does not answer."""
    if client is None:
        return None
    workflow = TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
    kind = workflow if name == WORKFLOW_QUEUE else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=name), task_queue_type=kind
    )
    try:
        answer = await client.workflow_service.describe_task_queue(
            request, timeout=relay.RPC_TIMEOUT
        )
    except RPCError as error:
        return Queue(name=name) if error.status is RPCStatusCode.NOT_FOUND else None
    pollers = [(each.identity, _ago(each.last_access_time)) for each in answer.pollers]
    return Queue(name=name, pollers=tuple(sorted(pollers, key=lambda poller: poller[1])))


async def workflow(client: Client | None, workflow_id: str) -> Workflow:
    """A group's workflow, with what its executions last said."""
    if client is None:
        return Workflow(status="unreachable")
    try:
        described = await client.get_workflow_handle(workflow_id).describe(
            rpc_timeout=relay.RPC_TIMEOUT
        )
    except RPCError as error:
        missing = error.status is RPCStatusCode.NOT_FOUND
        return Workflow(status="unknown" if missing else "unreachable")
    if described.status is not WorkflowExecutionStatus.RUNNING:
        return Workflow(status="closed")
    raw = described.raw_description
    task = raw.pending_workflow_task
    scheduled = raw.HasField("pending_workflow_task") and task.HasField("scheduled_time")
    activities = {
        key: await _activity(client, info)
        for info in raw.pending_activities
        if (key := _key(info.activity_id)) is not None
    }
    return Workflow(
        status="running",
        task_waits_s=_ago(task.scheduled_time) if scheduled else None,
        activities=activities,
    )


def _of_attempt(each: Idle, described: Workflow, queue: Queue | None, running: int) -> Wait:
    seconds: float | None
    if each.tries is not None:
        why = each.delivery_error or "no steward has taken it"
        on, detail, seconds = "relay", f"its start is not delivered: {why}", each.age_s
    else:
        on, detail, seconds = waits.of_attempt(
            described,
            (each.sample, each.attempt),
            queue,
            running=running,
            environment=each.environment,
        )
    execution = described.activities.get((each.sample, each.attempt))
    beat = (execution and execution.beat) or {}
    return Wait(
        what=f"group {each.group} · sample {each.sample} · attempt {each.attempt}",
        on=on,
        detail=detail,
        seconds=each.silent_s if seconds is None else seconds,
        workflow_id=each.workflow_id,
        group=each.group,
        sample=each.sample,
        attempt=each.attempt,
        turn=each.turns,
        tokens=each.tokens,
        version=each.version,
        phase=beat.get("phase"),
        heartbeat_s=execution.heartbeat_s if execution and beat else None,
    )


async def _workflows(client: Client | None, found: Sequence[Idle]) -> dict[str, Workflow]:
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(workflow_id: str) -> tuple[str, Workflow]:
        async with slots:
            return workflow_id, await workflow(client, workflow_id)

    ids = sorted({each.workflow_id for each in found})
    return dict(await asyncio.gather(*(one(workflow_id) for workflow_id in ids)))


async def _activity(client: Client, info: PendingActivityInfo) -> Activity:
    beats: list[Any] = []
    if info.HasField("heartbeat_details"):
        beats = await client.data_converter.decode(info.heartbeat_details.payloads)
    beat = dict(beats[0]) if beats and isinstance(beats[0], dict) else None
    heard = info.last_heartbeat_time if beat else info.last_started_time
    ago = _ago(heard) if heard.seconds else None
    if beat and ago is not None and isinstance(beat.get("for_s"), int | float):
        beat["for_s"] += ago
    state: Any = _STATES.get(info.state, "scheduled")
    return Activity(
        state=state,
        tries=info.attempt,
        scheduled_s=_ago(info.scheduled_time),
        heartbeat_s=ago,
        beat=beat,
        worker=info.last_worker_identity,
        last_failure=info.last_failure.message,
    )


def _key(activity_id: str) -> tuple[int, int] | None:
    """Sample and attempt in an activity id of the form s0.a1; None for another activity."""
    sample, dot, attempt = activity_id.partition(".")
    named = dot and sample[:1] == "s" and attempt[:1] == "a"
    if not named or not sample[1:].isdecimal() or not attempt[1:].isdecimal():
        return None
    return int(sample[1:]), int(attempt[1:])


def _ago(moment: Timestamp) -> float:
    return max(0.0, (datetime.now(UTC) - moment.ToDatetime(tzinfo=UTC)).total_seconds())


Told = tuple[str, str, float | None]


def _steward(parts: Parts) -> list[Told]:
    told: list[Told] = []
    oldest = parts.oldest_undelivered_s
    if oldest is not None and oldest >= PART_S:
        why = parts.delivery_error or "no ledger worker leads; start `rollbook worker ledger`"
        told.append(("steward", f"{parts.undelivered} commands are not delivered: {why}", oldest))
    if parts.set_aside:
        what = (
            f"{parts.set_aside} commands were refused again and again and are set aside; the sweep"
        )
        why = f"{what} does what they were for. The newest: {parts.refusal}"
        told.append(("steward", why, parts.oldest_set_aside_s))
    return told


async def _workers(client: Client | None, ledger: Ledger, parts: Parts, run: str) -> list[Told]:
    """Queues that nobody serves although work waits in them."""
    told: list[Told] = []
    if parts.oldest_waiting_s is not None and parts.oldest_waiting_s > PART_S:
        queue = await polled(client, WORKFLOW_QUEUE) or Queue(name=WORKFLOW_QUEUE)
        what = f"{parts.waiting_groups} groups have not begun: {queue.nobody()}"
        told.append(("workflow worker", what, parts.oldest_waiting_s))
    if parts.moving:
        return told
    found = await ledger.run(idle.attempts, run, silent_s=PART_S, limit=LOOKED_AT)
    executions = _executions(found, await _workflows(client, found))
    scheduled = [each.scheduled_s for each in executions if each.state == "scheduled"]
    longest = max([*scheduled, parts.oldest_queued_s or 0.0])
    if longest > PART_S and not any(each.heard for each in executions):
        known = await polled(client, rollout_queue(parts.environment))
        what = f"no attempt runs: {waits.nobody(known, parts.environment)}"
        told.append(("rollout worker", what, longest))
    return told


def _executions(found: Sequence[Idle], workflows: Mapping[str, Workflow]) -> list[Activity]:
    """What Temporal says of these attempts, where it knows them."""
    known = [
        workflows[each.workflow_id].activities.get((each.sample, each.attempt)) for each in found
    ]
    return [each for each in known if each is not None]


def _engines(parts: Parts) -> list[Told]:
    if parts.engines_alive or (not parts.engines and parts.served is None):
        return []
    seen = (
        f"none of {parts.engines} engines is seen" if parts.engines else "no engine was ever seen"
    )
    queue = f"; the steward ({LEDGER_QUEUE}) looks for them"
    return [("engine", seen + queue, parts.engine_seen_s)]


def _publish(parts: Parts) -> list[Told]:
    if parts.publishing is None or not parts.publish_due:
        return []
    version = f"version {parts.publishing}"
    if parts.publish_held_by:
        why = f"{version} has no slot on an engine: {parts.publish_held_by}"
    elif parts.lacking:
        why = f"{version} is not loaded by {', '.join(parts.lacking)}"
    else:
        why = f"{version} is being uploaded or announced"
    return [("publish", why, parts.publishing_for_s)]


def _trainer(parts: Parts, shares: Sequence[ShareOfStep]) -> list[Told]:
    if parts.state not in ("creating", "running"):
        return [
            ("paused" if parts.state == "paused" else "trainer", f"the run is {parts.state}", None)
        ]
    if parts.holder is None:
        return [("trainer", "no trainer holds the run", None)]
    if parts.lease_left_s is not None and parts.lease_left_s < 0:
        late = -parts.lease_left_s
        return [("trainer", f"{parts.holder} holds the run and does not renew its lease", late)]
    if all(share.planned for share in shares):
        return [("trainer", f"{parts.holder} computes step {parts.step}", None)]
    return [
        told
        for share in shares
        if not (share.planned or share.ended)
        for told in _share(parts, share, f"share {share.share}: " if len(shares) > 1 else "")
    ]


def _share(parts: Parts, share: ShareOfStep, whose: str) -> Iterator[Told]:
    """Why a share has no plan for the next step."""
    short = max(0, parts.batch_size - share.ready)
    if share.error is not None:
        yield "trainer", f"{whose}step {parts.step} cannot be planned: {share.error}", None
    elif share.slack is not None and share.slack < 0:
        groups = ", ".join(map(str, share.binding_groups[:5])) or "none that is still sampled"
        why = (
            f"{whose}step {parts.step} is held: group {groups} must train by version "
            f"{share.binding_deadline} (slack {share.slack})"
        )
        yield "hold", why, None
    elif short:
        why = (
            f"{whose}step {parts.step} lacks {short} of {parts.batch_size} groups; "
            f"{share.sampling} are sampled"
        )
        yield "groups", why, None
