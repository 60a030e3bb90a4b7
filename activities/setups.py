"""What a process needs of a run, loaded once: its configuration, chat format and sources."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from activities.chat import Chat
from domain import sources
from domain.config import RunConfig
from domain.environments import Source
from storage import manifests, runs
from storage.database import Ledger
from storage.objects import ObjectStore

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Of one environment of a run; fixed for its life."""

    config: RunConfig
    source: Source
    chat: Chat


class Once(Generic[K, T]):
    """Loads a thing per key once per process; concurrent callers share one load."""

    def __init__(self, load: Callable[[K], Awaitable[T]]) -> None:
        self._load = load
        self._loads: dict[K, asyncio.Future[T]] = {}

    async def get(self, key: K) -> T:
        """What belongs to a key; a load that failed is tried again."""
        load = self._loads.get(key)
        if load is None or (load.done() and (load.cancelled() or load.exception() is not None)):
            load = self._loads[key] = asyncio.ensure_future(self._load(key))
        return await asyncio.shield(load)


class Formats:
    """A run's configuration and chat format, without its source: what the gateway needs."""

    def __init__(self, ledger: Ledger, store: ObjectStore, folder: Path) -> None:
        """Nothing is loaded yet; arguments as for `Setups`."""
        self._ledger = ledger
        self._store = store
        self._folder = folder
        self._known = Once(self._load)

    async def get(self, run: str) -> tuple[RunConfig, Chat]:
        """The format of a run.

        Raises:
            RunNotFound: no such run.
            ObjectError: the model folder is missing or damaged.
        """
        return await self._known.get(run)

    async def _load(self, run: str) -> tuple[RunConfig, Chat]:
        found = await self._ledger.run(runs.read, run)
        key = str(found.world["model_manifest"])
        digest = Path(key).parent.name  # models/SHA256/manifest.json
        folder = self._folder / digest
        await asyncio.to_thread(manifests.fetch, self._store, key, folder, sha256=digest)
        chat = await asyncio.to_thread(Chat.open, folder, renderer=found.config.model.renderer)
        return found.config, chat


class Setups:
    """What a rollout worker needs of each run."""

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
        self._formats = Formats(ledger, store, folder)
        self._load_source = load_source
        self._known = Once(self._load)

    async def get(self, run: str, environment: str) -> Setup:
        """The setup of a run's environment.

        Raises:
            RunNotFound: no such run.
            ConfigError: the source cannot be loaded, or contradicts the configuration.
            ObjectError: the model folder is missing or damaged.
        """
        return await self._known.get((run, environment))

    async def _load(self, which: tuple[str, str]) -> Setup:
        run, environment = which
        config, chat = await self._formats.get(run)
        config = config.of(environment)
        # User code may take its time to import; heartbeats of other attempts must go on.
        source = await asyncio.to_thread(self._load_source, config)
        return Setup(config=config, source=source, chat=chat)
