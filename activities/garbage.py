"""Deletes from the object store what the ledger says nobody can ask for again.

Objects first, then the row says so: a steward that dies between the two deletes them once more.
"""

import asyncio
import logging
from dataclasses import dataclass

from domain.errors import ObjectError
from storage import checkpoints, garbage, manifests, pushes
from storage.database import Ledger
from storage.objects import ObjectStore

logger = logging.getLogger(__name__)


@dataclass
class Garbage:
    """Collects weights and checkpoints of all runs of a ledger."""

    ledger: Ledger
    store: ObjectStore

    async def collect(self) -> None:
        """One round. A store that is out is asked again in the next."""
        for run in await self.ledger.run(garbage.runs_with_garbage):
            try:
                await self._checkpoints(run)
                await self._weights(run)
            except ObjectError as error:
                logger.warning("objects of run %s were not deleted: %s", run, error)

    async def _checkpoints(self, run: str) -> None:
        rows = await self.ledger.run(checkpoints.retire, run)
        for row in rows:
            await asyncio.to_thread(manifests.remove, self.store, f"{row.prefix}/{manifests.NAME}")
            await self.ledger.run(checkpoints.deleted, run, [row.step])

    async def _weights(self, run: str) -> None:
        for version, key in await self.ledger.run(garbage.unneeded_weights, run):
            if key != pushes.KEY:  # a publisher's own weights were never in the store
                await asyncio.to_thread(manifests.remove, self.store, key)
            await self.ledger.run(garbage.note_deleted_weights, run, [version])
            logger.info("deleted the weights of %s@%d", run, version)
