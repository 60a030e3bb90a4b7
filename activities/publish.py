"""Making engines serve a version: one activity per engine, so that none holds up another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from temporalio import activity

from activities import fleet
from activities.inference import EngineClient
from activities.ledger import transact
from domain.messages import EngineList, EngineRef, PublishIn, PublishRefused, Serve
from storage import census, runs, versions
from storage.database import Ledger, Tx


@dataclass
class ServingActivities:
    """The ledger's side of a publication. Run as local activities of PublishWorkflow."""

    ledger: Ledger

    @activity.defn
    async def live_engines(self, publish: PublishIn) -> EngineList:
        """The engines that must acknowledge the version."""
        found = await transact(self.ledger, census.live_engines, publish.run)
        return EngineList(
            engines=tuple(
                EngineRef(
                    run=publish.run, version=publish.version, engine=url, incarnation=incarnation
                )
                for url, incarnation in found
            )
        )

    @activity.defn
    async def mark_served(self, serve: Serve) -> bool:
        """Serve the version if every live engine that still counts acknowledged it."""
        return await transact(
            self.ledger, versions.mark_served, serve.run, serve.version, without=serve.without
        )

    @activity.defn
    async def publish_refused(self, refused: PublishRefused) -> None:
        """No engine can ever serve the version: fail the run with what they said."""
        await transact(self.ledger, _refuse, refused)


def _refuse(tx: Tx, refused: PublishRefused) -> None:
    """Fail the run, unless the version is wanted no more: its weights may be gone by then."""
    if versions.state(tx, refused.run, refused.version) == "loading":
        reason = f"no engine serves {refused.run}@{refused.version}: {refused.reason}"
        runs.fail(tx, refused.run, reason)


@dataclass
class EngineActivities:
    """Talks to engines; runs in the ledger worker."""

    ledger: Ledger
    engines: EngineClient

    @activity.defn
    async def load_version(self, ref: EngineRef) -> None:
        """Have one engine fetch, check and acknowledge one version.

        Raises:
            EngineUnavailable: tried again.
            EngineRefused, DigestMismatch, WrongVersion: final for this engine.
        """
        async with _beating():
            await fleet.load(self.ledger, self.engines, ref.run, ref.version, ref.engine)


@asynccontextmanager
async def _beating(every_s: float = 1.0) -> AsyncIterator[None]:
    """Heartbeat beside the work, so that a cancel arrives and a dead worker is noticed."""

    async def beat() -> None:
        while True:
            activity.heartbeat()
            await asyncio.sleep(every_s)

    beater = asyncio.create_task(beat())
    try:
        yield
    finally:
        beater.cancel()
