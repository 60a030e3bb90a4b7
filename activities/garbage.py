"""Deletes from the object store what the ledger says nobody can ask for again.

Objects first, then the row says so: a steward that dies between the two deletes them once more.
"""

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from domain.errors import ObjectError, RollbookError
from storage import checkpoints, garbage, manifests, pushes
from storage.database import Ledger
from storage.objects import Entry, ObjectStore

logger = logging.getLogger(__name__)

ORPHAN_S = 86_400.0
"""Age from which what nobody names counts as left behind: longer than any upload takes."""


@dataclass
class Garbage:
    """Collects weights and checkpoints of all runs of a ledger."""

    ledger: Ledger
    store: ObjectStore

    async def collect(self) -> None:
        """One round. A store that is out is asked again in the next; no run ends the care for others."""
        for run in await self.ledger.run(garbage.runs_with_garbage):
            try:
                await self._checkpoints(run)
                await self._weights(run)
            except RollbookError as error:
                logger.warning("objects of run %s were not deleted: %s", run, error)

    async def sweep(self, *, older_s: float = ORPHAN_S) -> None:
        """Delete what a crash left behind: checkpoints that no row names, and parts of uploads.

        Of the runs of this ledger only. Names are not unique in a store that several ledgers share,
        so a complete checkpoint must also say that it is of this very run.
        """
        known = await self.ledger.run(garbage.census)
        before = known.now - timedelta(seconds=older_s)
        for run, born in known.born.items():
            try:
                await asyncio.to_thread(self._sweep_run, run, born, known.named, before)
            except ObjectError as error:
                logger.warning("the store was not swept for run %s: %s", run, error)

    def _sweep_run(self, run: str, born: datetime, named: frozenset[str], before: datetime) -> None:
        sets: dict[str, list[Entry]] = {}
        for entry in self.store.list(f"checkpoints/{run}/"):
            sets.setdefault("/".join(entry.key.split("/")[:4]), []).append(entry)
        for prefix, entries in sets.items():
            if prefix in named or max(entry.modified for entry in entries) > before:
                continue
            key = f"{prefix}/{manifests.NAME}"
            whole = any(entry.key == key for entry in entries)
            if whole and manifests.read(self.store, key).meta.get("born") != born.isoformat():
                continue
            manifests.remove(self.store, key)
            logger.info("deleted %s: a crash had left it, no row names it", prefix)
        for kind in ("checkpoints", "weights"):
            for upload in self.store.unfinished(f"{kind}/{run}/"):
                if upload.begun < before:
                    self.store.abort(upload)
                    logger.info("aborted the unfinished upload of %s", upload.key)

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
