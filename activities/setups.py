"""What a worker needs of a run, loaded once: its configuration, its source and its chat format."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from activities.chat import Chat
from domain import sources
from domain.config import RunConfig
from domain.environments import Source
from storage import manifests, runs
from storage.database import Ledger
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Fixed for the life of a run."""

    config: RunConfig
    source: Source
    chat: Chat


class Setups:
    """Loads each run once per process; concurrent callers share one load."""

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        folder: Path,
        *,
        load_source: Callable[[RunConfig], Source] = sources.load,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            ledger: where runs stand.
            store: where their models' tokenizers lie.
            folder: keeps fetched model folders between runs and restarts.
            load_source: replaced where the source is an object of the calling process.
        """
        self._ledger = ledger
        self._store = store
        self._folder = folder
        self._load_source = load_source
        self._loads: dict[str, asyncio.Task[Setup]] = {}

    async def get(self, run: str) -> Setup:
        """The setup of a run.

        Raises:
            RunNotFound: no such run.
            ConfigError: the source cannot be loaded, or contradicts the configuration.
            ObjectError: the model folder is missing or damaged.
        """
        load = self._loads.get(run)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = self._loads[run] = asyncio.create_task(self._load(run))
        return await asyncio.shield(load)

    async def _load(self, run: str) -> Setup:
        found = await self._ledger.run(runs.read, run)
        key = str(found.world["model_manifest"])
        digest = Path(key).parent.name  # models/SHA256/manifest.json
        folder = self._folder / digest
        await asyncio.to_thread(manifests.fetch, self._store, key, folder, sha256=digest)
        chat = await asyncio.to_thread(Chat.open, folder, renderer=found.config.model.renderer)
        # User code may take its time to import; heartbeats of other attempts must go on.
        source = await asyncio.to_thread(self._load_source, found.config)
        return Setup(config=found.config, source=source, chat=chat)
