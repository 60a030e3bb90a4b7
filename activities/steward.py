"""The steward: relay, sweep, engines and housekeeping; a plain loop outside Temporal.

It needs Temporal for nothing but delivery, so it outlives the loss of Temporal itself, and refills it
from the ledger. Every ledger worker runs one; a Postgres advisory lock makes one of them lead. A
second leader would be harmless (row locks and compare-and-sets), only wasteful.

    relay          as fast as commands come       fleet          every second
    sweep          every half minute              namespace      every minute, and at once
    retirement     every five seconds             garbage        every minute
    housekeeping   every ten minutes               dead workers   every second
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
from psycopg_pool import PoolTimeout
from temporalio.client import Client
from temporalio.service import RPCError

from activities import namespace
from activities.fleet import Fleet
from activities.garbage import Garbage
from activities.mourning import Mourning
from activities.relay import Relay
from activities.sweep import Sweep
from storage import housekeeping, outbox
from storage.connections import ALIVE, AsyncWatched
from storage.database import Ledger

logger = logging.getLogger(__name__)

AWAY = (psycopg.OperationalError, PoolTimeout, RPCError, OSError)
"""The ledger or Temporal is not there, or refuses for now. The steward waits for it."""

LEADERSHIP = "hashtextextended('rollbook steward', 0)"
"""Key of the advisory lock. Locks are per database, so each ledger has its own steward."""


class LostLeadership(Exception):
    """The connection that holds the lock is gone; another may lead already."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """Seconds between rounds."""

    candidate: float = 5.0
    """Between two tries to lead."""
    relay_min: float = 0.02
    relay_max: float = 0.25
    fleet: float = 1.0
    mourning: float = 1.0
    retirement: float = 5.0
    garbage: float = 60.0
    sweep: float = 30.0
    namespace: float = 60.0
    housekeeping: float = 600.0
    purge_after: float = 3_600.0
    """Age of delivered commands that are deleted."""


@dataclass(kw_only=True)
class Steward:
    """One candidate for the lead."""

    database_url: str
    ledger: Ledger
    client: Client
    fleet: Fleet
    relay: Relay
    sweep: Sweep
    garbage: Garbage
    mourning: Mourning
    rhythm: Rhythm = Rhythm()

    async def run(self) -> None:
        """Lead whenever possible, until cancelled."""
        while True:
            try:
                await self._stand()
            except* (LostLeadership, *AWAY) as lost:
                logger.warning("not leading: %s", lost.exceptions[0])
            await asyncio.sleep(self.rhythm.candidate)

    async def _stand(self) -> None:
        """Lead if nobody does. The lock ends with its connection, however that ends."""
        connect = AsyncWatched.connect(
            self.database_url, autocommit=True, application_name="rollbook steward", **ALIVE
        )
        async with await connect as lock:
            if await _locked(lock):
                logger.info("leading")
                await self._lead(lock)

    async def _lead(self, lock: AsyncWatched) -> None:
        rhythm = self.rhythm
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hold(lock))
                tasks.create_task(self._relay())
                for name, seconds, step in (
                    ("namespace", rhythm.namespace, self._ensure_namespace),
                    ("fleet", rhythm.fleet, self.fleet.tend),
                    ("retirement", rhythm.retirement, self.fleet.retire),
                    ("garbage", rhythm.garbage, self.garbage.collect),
                    ("sweep", rhythm.sweep, self.sweep.run),
                    ("dead workers", rhythm.mourning, self.mourning.report),
                    ("housekeeping", rhythm.housekeeping, self._keep_house),
                ):
                    tasks.create_task(every(name, seconds, step))
        finally:
            await self.fleet.stop()

    async def _hold(self, lock: AsyncWatched) -> None:
        while True:
            await asyncio.sleep(self.rhythm.candidate / 2)
            try:
                await lock.execute("SELECT 1")
            except psycopg.OperationalError as error:
                raise LostLeadership(str(error)) from error

    async def _relay(self) -> None:
        pause = self.rhythm.relay_min
        while True:
            try:
                due = await self.relay.deliver()
            except AWAY as error:
                logger.warning("relay: %s", error)
                due, pause = 0, self.rhythm.relay_max * 4
                with suppress(*AWAY):  # a Temporal that lost its database has lost its namespace
                    await self._ensure_namespace()
            if due:
                pause = self.rhythm.relay_min
                continue
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, self.rhythm.relay_max)

    async def _ensure_namespace(self) -> None:
        await namespace.ensure(self.client)

    async def _keep_house(self) -> None:
        await self.garbage.sweep()
        await self.ledger.run(outbox.purge, older_s=self.rhythm.purge_after)
        await self.ledger.run(housekeeping.add_event_partitions, datetime.now(UTC).date())


async def tend_own(fleet: Fleet, rhythm: Rhythm = Rhythm()) -> None:
    """Tend engines that serve one run, leading or not: another ledger worker cannot see them."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(every("fleet", rhythm.fleet, fleet.tend))
            tasks.create_task(every("retirement", rhythm.retirement, fleet.retire))
    finally:
        await fleet.stop()


async def _locked(connection: AsyncWatched) -> bool:
    cursor = await connection.execute(f"SELECT pg_try_advisory_lock({LEADERSHIP})")
    row = await cursor.fetchone()
    return bool(row and row[0])


async def every(name: str, seconds: float, step: Callable[[], Awaitable[object]]) -> None:
    """Repeat a step for ever; what is away is waited for, anything else is raised."""
    said = ""
    while True:
        try:
            await step()
            said = ""
        except AWAY as error:
            if str(error) != said:
                said = str(error)
                logger.warning("%s: %s", name, error)
        await asyncio.sleep(seconds)
