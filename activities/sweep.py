"""Finds what Temporal lost, what the ledger gave up, and what broke, and settles it.

Everything found is checked with Temporal by workflow id and settled by compare-and-set on the
generation or fence, so a sweep that is late, doubled or wrong about the present changes nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import psycopg
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from activities import relay, waits
from domain import failpoints
from domain.errors import RollbookError
from domain.ids import publish_workflow_id
from domain.messages import (
    SINCE,
    Close,
    FinishGroup,
    GroupIn,
    GroupState,
    PublishIn,
    Stuck,
    StuckAttempt,
)
from storage import census, groups, housekeeping, quarantine, reopen, runs
from storage.census import Open, Silent
from storage.database import Ledger

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMIT = 256
"""Looked at in one sweep; the oldest first, so the rest have their turn."""

CONCURRENT = 16

Gist = frozenset[tuple[int, int, str]]
"""What makes a report of a stuck group a new one: sample, attempt and what they wait on."""

RUNNING = 'WorkflowType = "GroupWorkflow" AND ExecutionStatus = "Running"'


@dataclass
class Sweep:
    """One round a call. Remembers only which workflows looked superfluous the last time."""

    ledger: Ledger
    client: Client
    grace_s: float = 60.0
    """Nothing younger is looked at: a start or a close takes its time."""
    silent_s: float = GroupIn.heartbeat_s * (1 + GroupIn.resumes)
    """An attempt may be silent for so long before it is asked for."""
    _superfluous: frozenset[str] = field(default_factory=frozenset)
    _told: dict[str, Gist] = field(default_factory=dict)  # stuck groups, as their workflows know

    async def run(self) -> None:
        """All checks, in an order in which each sees what the earlier ones settled.

        Raises:
            psycopg.OperationalError, RPCError: the ledger or Temporal is away; the next round does it.
        """
        await self._reopen_lost_groups()
        await self._close_superfluous_workflows()
        await self._end_cancelled_attempts()
        await self._lose_silent_attempts()
        await self._restart_publications()
        await self._quarantine_poison_tasks()
        await self._tell_stuck_groups()
        await self._fail_violated_runs()

    async def _reopen_lost_groups(self) -> None:
        """A submitted group whose workflow is closed or unknown: open it again as lost."""
        quiet = await self.ledger.run(census.quiet_groups, grace_s=self.grace_s, limit=LIMIT)
        await each(quiet, self._look_at_group)

    async def _look_at_group(self, group: Open) -> None:
        status = await self._status(group.workflow_id)
        if status is WorkflowExecutionStatus.RUNNING:
            return
        if status is WorkflowExecutionStatus.CANCELED:  # by a person, before it could say so
            ending = FinishGroup(
                run=group.run,
                group=group.group,
                gen=group.gen,
                outcome="cancelled",
                cause="human",
            )
            await self.ledger.run(groups.finish, ending)
        else:
            await self.ledger.run(reopen.reopen, group.run, group.group, group.gen, cause="lost")
            failpoints.reach("sweep_reopened")
        logger.warning(
            "group %s of run %s: workflow %s is %s; settled",
            group.group,
            group.run,
            group.workflow_id,
            "unknown to Temporal" if status is None else status.name.lower(),
        )

    async def _close_superfluous_workflows(self) -> None:
        """A running workflow that no submitted group names, seen twice: tell it to end."""
        active = frozenset(await self.ledger.run(census.runs_to_tend))
        before = datetime.now(UTC) - timedelta(seconds=self.grace_s)
        old = f'{RUNNING} AND StartTime < "{before:%Y-%m-%dT%H:%M:%SZ}"'
        found = [execution.id async for execution in self.client.list_workflows(old)]
        ours = [each for each in found if _run_of(each) in active]
        current = await self.ledger.run(census.current_workflows, ours)
        superfluous = frozenset(ours) - current
        for workflow_id in sorted(superfluous & self._superfluous):
            logger.warning("workflow %s belongs to no submitted group; closing it", workflow_id)
            await relay.signal(self.client, workflow_id, "close_group", [Close(cause="close")])
        self._superfluous = superfluous

    async def _end_cancelled_attempts(self) -> None:
        """An attempt that was told to stop, and whose workflow is gone: it has stopped."""
        silent = await self.ledger.run(
            census.silent_attempts, silent_s=self.grace_s, cancelled=True, limit=LIMIT
        )
        await each(silent, self._look_at_cancelled)

    async def _look_at_cancelled(self, attempt: Silent) -> None:
        if await self._status(attempt.workflow_id) is not WorkflowExecutionStatus.RUNNING:
            await self.ledger.run(housekeeping.end_cancelled, attempt)

    async def _lose_silent_attempts(self) -> None:
        """An attempt that its running workflow does not answer for any more: lost."""
        silent = await self.ledger.run(
            census.silent_attempts, silent_s=self.silent_s, cancelled=False, limit=LIMIT
        )
        await each(silent, self._look_at_silent)

    async def _look_at_silent(self, attempt: Silent) -> None:
        try:
            state = await self.client.get_workflow_handle(attempt.workflow_id).query(
                "state", result_type=GroupState, rpc_timeout=relay.RPC_TIMEOUT
            )
        except WorkflowQueryFailedError:
            return
        except RPCError as error:
            # Gone: its group is the matter of the group check. No worker answers: ask again later.
            logger.info("no answer from %s: %s", attempt.workflow_id, error)
            return
        if not any(
            (live.sample, live.attempt) == (attempt.sample, attempt.attempt) for live in state.live
        ):
            await self.ledger.run(housekeeping.lose, attempt)

    async def _restart_publications(self) -> None:
        """A version that loads, and whose publication is closed or unknown: start it again."""
        for run, version in await self.ledger.run(census.stuck_publications, grace_s=self.grace_s):
            status = await self._status(publish_workflow_id(run, version))
            if status is not WorkflowExecutionStatus.RUNNING:
                logger.warning("the publication of %s@%s is gone; starting it", run, version)
                await relay.start_publish(self.client, PublishIn(run=run, version=version))

    async def _quarantine_poison_tasks(self) -> None:
        """A task whose groups were abandoned again and again by its own failures: set it aside."""
        await each(await self.ledger.run(census.runs_to_tend), self._look_for_poison)

    async def _look_for_poison(self, run: str) -> None:
        for task, reason in await self.ledger.run(quarantine.set_aside, run):
            logger.warning("task %s of run %s is quarantined: %s", task, run, reason)

    async def _tell_stuck_groups(self) -> None:
        """Let people find in the Temporal UI what does not move, and read there what it waits for."""
        now: dict[str, Stuck] = {}
        for run in await self.ledger.run(census.runs_to_tend):
            now |= await _stuck_groups(self.client, self.ledger, run)
        news = {key: found for key, found in now.items() if _gist(found) != self._told.get(key)}
        news |= {key: Stuck() for key in self._told if key not in now}
        for workflow_id, found in news.items():
            await relay.signal(self.client, workflow_id, "stuck", [found])
        self._told = {key: _gist(found) for key, found in now.items()}

    async def _fail_violated_runs(self) -> None:
        """A rule of the ledger is broken: stop that run before it trains on it."""
        for run, what in await self.ledger.run(census.violations):
            logger.error("run %s breaks a rule of the ledger and is stopped: %s", run, what)
            await self.ledger.run(runs.fail, run, f"ledger violation: {what}")

    async def _status(self, workflow_id: str) -> WorkflowExecutionStatus | None:
        """None: Temporal does not know the workflow."""
        try:
            handle = self.client.get_workflow_handle(workflow_id)
            return (await handle.describe(rpc_timeout=relay.RPC_TIMEOUT)).status
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise


def _run_of(workflow_id: str) -> str | None:
    """The run in an id of the form run/RUN/...; None for a workflow of someone else."""
    parts = workflow_id.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "run" else None


async def _stuck_groups(client: Client, ledger: Ledger, run: str) -> dict[str, Stuck]:
    """Running workflows with attempts that make no progress, by id."""
    now = datetime.now(UTC)
    groups: dict[str, list[StuckAttempt]] = {}
    for wait in await waits.of_attempts(client, ledger, run):
        if wait.workflow_id is None or wait.on in ("relay", "sweep"):
            continue
        assert wait.sample is not None
        assert wait.attempt is not None
        since = now - timedelta(seconds=wait.seconds or 0.0)
        told = StuckAttempt(
            sample=wait.sample,
            attempt=wait.attempt,
            waits_on=wait.on,
            why=wait.detail[:300],
            since=f"{since:{SINCE}}",
            turn=wait.turn,
            tokens=wait.tokens,
            version=wait.version,
        )
        groups.setdefault(wait.workflow_id, []).append(told)
    return {key: Stuck(attempts=tuple(told)) for key, told in groups.items()}


def _gist(found: Stuck) -> Gist:
    return frozenset((told.sample, told.attempt, told.waits_on) for told in found.attempts)


async def each(items: Sequence[T], look: Callable[[T], Awaitable[None]]) -> None:
    """Look at all items, some at once. One that is refused is named and left to the next round.

    A group that the ledger refuses to settle must not end the care for every other run.

    Raises:
        psycopg.OperationalError, RPCError: the ledger or Temporal is away.
    """
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(item: T) -> None:
        async with slots:
            try:
                await look(item)
            except psycopg.OperationalError:
                raise
            except (psycopg.Error, RollbookError, AssertionError):
                logger.exception("%s could not be settled", item)

    await asyncio.gather(*(one(item) for item in items))
