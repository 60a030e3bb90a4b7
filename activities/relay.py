"""Carries the ledger's commands to Temporal: at least once, each a no-op when it comes twice.

A workflow that is running or has run already is not started again; a signal for a workflow that is
gone is done. So nothing here needs a transaction over both sides.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import TypeAdapter
from temporalio.client import Client
from temporalio.common import (
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities import namespace
from domain import failpoints, tracing
from domain.ids import publish_workflow_id
from domain.messages import WORKFLOW_QUEUE, CancelSample, Close, GroupIn, PublishIn
from storage import outbox
from storage.database import Ledger
from storage.outbox import Command

logger = logging.getLogger(__name__)

CONCURRENT = 32
"""Deliveries at once; more only makes workflow tasks queue until they time out."""

BATCH = 128

RPC_TIMEOUT = timedelta(seconds=10)

_REFUSALS = frozenset(
    {
        RPCStatusCode.INVALID_ARGUMENT,
        RPCStatusCode.FAILED_PRECONDITION,
        RPCStatusCode.OUT_OF_RANGE,
        RPCStatusCode.UNIMPLEMENTED,
    }
)
"""What Temporal says of a command; every other status is about Temporal, and time may mend it."""

_UNPREPARED = "no mapping defined for search attribute"
"""Said of every command by a namespace that was made anew and has not got its attributes yet."""

_GROUP = TypeAdapter(GroupIn)
_PUBLISH = TypeAdapter(PublishIn)


class Relay:
    """Delivers what is due. One per steward."""

    def __init__(self, ledger: Ledger, client: Client) -> None:
        """Nothing is read before `deliver`."""
        self._ledger = ledger
        self._client = client
        self._slots = asyncio.Semaphore(CONCURRENT)

    async def deliver(self) -> int:
        """Deliver one batch; how many commands were due.

        Raises:
            psycopg.OperationalError: the ledger is away.
            RPCError: Temporal is away; the commands it took are marked all the same.
        """
        commands = await self._ledger.run(outbox.claim, BATCH)
        if not commands:
            return 0
        results = await asyncio.gather(*(self._try(command) for command in commands))
        failpoints.reach("relay_mid")
        delivered = [c.id for c, error in zip(commands, results, strict=True) if error is None]
        if delivered:
            await self._ledger.run(outbox.done, delivered)
        failures = [(c, e) for c, e in zip(commands, results, strict=True) if e is not None]
        for command, error in failures:
            if _is_refusal(error):
                await self._refuse(command, error)
        away = {c.id: e for c, e in failures if not _is_refusal(e)}
        if away:
            await self._ledger.run(outbox.failed, {id: str(e) for id, e in away.items()})
            raise next(iter(away.values()))
        return len(commands)

    async def _try(self, command: Command) -> Exception | None:
        async with self._slots:
            try:
                with tracing.continued(command.payload):
                    await self._deliver(command)
            except (RPCError, LookupError, TypeError, ValueError) as error:
                return error
        return None

    async def _refuse(self, command: Command, error: Exception) -> None:
        told = f"{type(error).__name__}: {error}"
        aside = await self._ledger.run(outbox.refused, command.id, told[:2_000])
        logger.warning("%s %s is refused: %s", command.kind, command.key, told)
        if aside:
            logger.error(
                "%s %s was refused %d times and is set aside; `rollbook stuck %s` names it",
                command.kind,
                command.key,
                outbox.REFUSALS,
                command.run,
            )

    async def _deliver(self, command: Command) -> None:
        match command.kind:
            case "start_group":
                await start_group(
                    self._client, command.key, _GROUP.validate_python(command.payload)
                )
            case "publish":
                await start_publish(self._client, _PUBLISH.validate_python(command.payload))
            case "cancel_sample":
                request = CancelSample(
                    sample=command.payload["sample"],
                    attempt=command.payload["attempt"],
                    cause=command.payload["cause"],
                )
                await signal(
                    self._client, command.payload["workflow_id"], "cancel_sample", [request]
                )
            case "close_group":
                close = Close(cause=command.payload["cause"])
                await signal(self._client, command.payload["workflow_id"], "close_group", [close])
            case "deadline":
                await signal(self._client, command.payload["workflow_id"], "deadline_reached", [])


def _is_refusal(error: Exception) -> bool:
    """Whether it is the command that is wrong: Temporal said so, or this code cannot read it."""
    if not isinstance(error, RPCError):
        return True
    return error.status in _REFUSALS and _UNPREPARED not in str(error)


async def start_group(client: Client, workflow_id: str, group: GroupIn) -> None:
    """Start a generation of a group exactly once, whatever its workflow has come to since."""
    spares = len(group.samples) - (group.size - group.kept)
    attributes: list[SearchAttributePair[Any]] = [
        SearchAttributePair(namespace.RUN, group.run),
        SearchAttributePair(namespace.STAGE, "sampling"),
        SearchAttributePair(namespace.ENVIRONMENT, group.environment),
        SearchAttributePair(namespace.BATCH, group.batch),
        SearchAttributePair(namespace.SUBMITTED_VERSION, group.submitted_version),
        SearchAttributePair(namespace.RESUBMISSIONS, 0),
    ]
    if group.timeout_s is not None:
        due = datetime.now(UTC) + timedelta(seconds=group.timeout_s)
        attributes.append(SearchAttributePair(namespace.DUE, due))
    try:
        await client.start_workflow(
            "GroupWorkflow",
            group,
            id=workflow_id,
            task_queue=WORKFLOW_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            search_attributes=TypedSearchAttributes(attributes),
            static_summary=f"{group.run} · batch {group.batch} · task {group.task[:80]} · "
            f"{group.size}+{max(0, spares)}",
            rpc_timeout=RPC_TIMEOUT,
        )
    except WorkflowAlreadyStartedError:
        logger.debug("workflow %s has run already", workflow_id)


async def start_publish(client: Client, publish: PublishIn) -> None:
    """Start a publication, unless one of this version is running."""
    await client.start_workflow(
        "PublishWorkflow",
        publish,
        id=publish_workflow_id(publish.run, publish.version),
        task_queue=WORKFLOW_QUEUE,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        search_attributes=TypedSearchAttributes([SearchAttributePair(namespace.RUN, publish.run)]),
        static_summary=f"publish {publish.run}@{publish.version}",
        rpc_timeout=RPC_TIMEOUT,
    )


async def signal(client: Client, workflow_id: str, name: str, args: Sequence[object]) -> None:
    """Signal a workflow; one that is closed or unknown needs it no more."""
    try:
        handle = client.get_workflow_handle(workflow_id)
        await handle.signal(name, args=args, rpc_timeout=RPC_TIMEOUT)
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
