"""Tells Temporal at once which attempts died with their worker, where that can be known.

A worker that is killed is noticed by its silence, after a heartbeat time-out that has to be long. A
steward on the same host sees that the process is gone, and fails its attempts by id: Temporal tries
them again on another worker, which goes on after the last committed segment. One that lives after
all is fenced by its successor, as after any time-out.
"""

import asyncio
import logging
from dataclasses import dataclass, field

from temporalio.client import AsyncActivityCancelledError, Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.relay import RPC_TIMEOUT
from domain import holders
from domain.ids import attempt_activity_id
from domain.messages import AttemptFailure
from storage import census
from storage.census import Silent
from storage.database import Ledger

logger = logging.getLogger(__name__)

CONCURRENT = 16


@dataclass
class Mourning:
    """One round a call. Remembers what it reported: a successor may not have begun yet."""

    ledger: Ledger
    client: Client
    _reported: set[tuple[str, int, int, int, int]] = field(default_factory=set)

    async def report(self) -> None:
        """Fail the attempts of dead workers of this host.

        Raises:
            psycopg.OperationalError, RPCError: the ledger or Temporal is away; the next round does it.
        """
        workers = await self.ledger.run(census.workers)
        dead = [worker for worker in workers if holders.is_gone(worker)]
        if not dead:
            self._reported.clear()
            return
        orphans = await self.ledger.run(census.attempts_of, dead)
        fresh = [orphan for orphan in orphans if _key(orphan) not in self._reported]
        slots = asyncio.Semaphore(CONCURRENT)

        async def one(orphan: Silent) -> None:
            async with slots:
                await self._fail(orphan)

        await asyncio.gather(*(one(orphan) for orphan in fresh))
        if fresh:
            logger.warning("%d attempts died with %s", len(fresh), ", ".join(dead))

    async def _fail(self, orphan: Silent) -> None:
        handle = self.client.get_async_activity_handle(
            workflow_id=orphan.workflow_id,
            run_id=None,
            activity_id=attempt_activity_id(orphan.sample, orphan.attempt),
        )
        error = ApplicationError("its worker died", type=AttemptFailure.WORKER_SHUTDOWN.value)
        try:
            await handle.fail(error, rpc_timeout=RPC_TIMEOUT)
        except AsyncActivityCancelledError:
            pass  # it was told to stop, and has
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:  # it has ended, or waits for a worker
                raise
        self._reported.add(_key(orphan))


def _key(orphan: Silent) -> tuple[str, int, int, int, int]:
    return (orphan.run, orphan.group, orphan.sample, orphan.attempt, orphan.fence)
