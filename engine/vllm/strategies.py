"""The two ways in which one vLLM server comes to serve a version.

    InPlace     full weights: one version at a time, replaced while the scheduler is paused
    Adapters    LoRA: one adapter a version, several at once; rollouts keep the one they began with

Both verify before the server hears of a version and prove it by the probe before anyone samples.
What each step guards against was observed (docs/adr/vllm-front.md).
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from domain.errors import EngineError, EngineRefused, EngineUnavailable
from domain.ids import policy_version
from engine.refusals import BadWeights, Full, Unsupported
from engine.vllm import probe, sets
from engine.vllm.command import BASE
from engine.vllm.control import Crossing
from engine.vllm.server import Server
from engine.vllm.sets import Shapes, Source, WeightSet
from storage import manifests

log = logging.getLogger(__name__)

Quieten = Callable[[], Awaitable[Crossing | None]]
"""Shuts the door to new requests and says what becomes of those that run: they go on under the new
weights, or (None) there are none left that may."""


class Strategy(Protocol):
    """How versions come and go."""

    replaces: bool
    """Whether a new version takes the place of the one before."""
    max_resident: int

    async def load(self, name: str, found: WeightSet, quieten: Quieten) -> None:
        """Make the server hold a version, verified.

        Raises:
            BadWeights, Unsupported: never will.
            EngineUnavailable: not now.
        """
        ...

    async def unload(self, name: str) -> None:
        """Give a version up: no request names it any more."""
        ...

    async def forget(self, name: str) -> None:
        """The last request of an unloaded version has ended."""
        ...

    def model(self, name: str) -> str:
        """The server's name of a version it holds."""
        ...

    def holds(self, name: str) -> bool:
        """Whether a version that was loaded is still there."""
        ...

    def reset(self) -> None:
        """The server is another one and holds nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Current:
    """What an in-place server computes with."""

    name: str
    found: WeightSet


class InPlace:
    """Full weights, one version at a time."""

    replaces = True
    max_resident = 1

    def __init__(self, server: Server, source: Source, work: Path) -> None:
        self._server = server
        self._source = source
        self._work = work
        self._current: _Current | None = None
        self._shapes: tuple[str, Shapes] | None = None

    async def load(self, name: str, found: WeightSet, quieten: Quieten) -> None:
        """Start the server with these weights, or pause it and replace what it has."""
        if found.adapter is not None:
            raise Unsupported(
                f"policy {name} is a LoRA adapter and this engine reloads full weights; start it "
                "with --lora-rank"
            )
        self._check_shapes(name, found)
        model = await asyncio.to_thread(self._source.fetch_model, found.model)
        start = await asyncio.to_thread(sets.assemble, model, found.folder, self._work / "base")
        if await self._server.ensure(start, found.dtype):
            self._current = None
            crossing = await quieten()
        else:
            crossing = await quieten()
            await self._replace(name, found, crossing)
        control = self._server.control
        await control.label(str(policy_version(name)[1]))
        await control.resume()
        try:
            await self._prove(name, found)
        except (BadWeights, EngineError):
            await self._give_up()
            raise
        before, self._current = self._current, _Current(name, found)
        self._shapes = (found.model, found.shapes)
        if before is not None and before.found.folder != found.folder:
            shutil.rmtree(before.found.folder, ignore_errors=True)

    async def unload(self, name: str) -> None:
        """Nothing to free: the next version takes the place."""

    async def forget(self, name: str) -> None:
        """As `unload`."""

    def model(self, name: str) -> str:
        """The one served model."""
        return BASE

    def holds(self, name: str) -> bool:
        """Whether it is the one that computes."""
        return self._current is not None and self._current.name == name

    def reset(self) -> None:
        """Forget what was there."""
        self._current = self._shapes = None

    def _check_shapes(self, name: str, found: WeightSet) -> None:
        if self._shapes is None:
            return  # the server itself insists on every tensor when it starts
        model, shapes = self._shapes
        if model != found.model:
            raise Unsupported(
                f"policy {name} is of model {found.model}, and this engine runs {model}; an engine "
                "that reloads in place serves one model: start another for this run"
            )
        if difference := sets.differing(shapes, found.shapes):
            raise BadWeights(f"policy {name} is not of this engine's model: {difference}")

    async def _replace(self, name: str, found: WeightSet, crossing: Crossing | None) -> None:
        """Pause and reload. After a failed reload the server must not compute: its weights are gone."""
        control = self._server.control
        await control.hold_back("abort" if crossing is None else "keep", clear=crossing != "hold")
        try:
            await control.reload(found.folder)
        except EngineError as error:
            await self._give_up()
            raise EngineUnavailable(f"policy {name} could not be loaded: {error}") from error

    async def _prove(self, name: str, found: WeightSet) -> None:
        if found.probe is None:
            return
        before = self._current.found.probe if self._current is not None else None
        await probe.verify(self._server.control, BASE, name, found.dtype, found.probe, before)

    async def _give_up(self) -> None:
        """Put the last proven weights back; without any, or if that fails too, end the server."""
        control, before, self._current = self._server.control, self._current, None
        try:
            await control.hold_back("abort", clear=True)
            if before is None:
                raise EngineUnavailable("no earlier version to go back to")
            await control.reload(before.found.folder)
            await control.label(str(policy_version(before.name)[1]))
            await control.resume()
            self._current = before
        except (EngineUnavailable, EngineRefused) as error:
            log.warning("vLLM is ended, to start anew: %s", error)
            await self._server.stop()


class Adapters:
    """LoRA adapters under their versions' names. The base model itself is never sampled.

    A request for the base model in one batch with an adapter's is contaminated by the adapter (CPU
    kernels), so version 0 is an adapter too, one that changes nothing.
    """

    replaces = False

    def __init__(
        self, server: Server, source: Source, work: Path, *, max_resident: int, rank: int
    ) -> None:
        self.max_resident = max_resident
        self._server = server
        self._source = source
        self._work = work
        self._rank = rank
        self._base: tuple[str, Shapes, str] | None = None
        self._folders: dict[str, Path] = {}
        self._proven: dict[str, WeightSet] = {}

    async def load(self, name: str, found: WeightSet, quieten: Quieten) -> None:
        """Register an adapter beside those that are there; nothing pauses."""
        self._check(name, found)
        assert found.base is not None
        base = await asyncio.to_thread(self._source.fetch, found.base, None)
        model = await asyncio.to_thread(self._source.fetch_model, found.model)
        start = await asyncio.to_thread(sets.assemble, model, base.folder, self._work / "base")
        await self._server.ensure(start, base.dtype)
        self._base = (found.base, found.shapes, base.dtype)
        folder = await asyncio.to_thread(self._place, name, found)
        control = self._server.control
        try:
            await control.load_adapter(name, folder)
        except EngineRefused as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise BadWeights(f"policy {name}: {error}") from error
        try:
            await self._prove(name, found, base.dtype)
        except (BadWeights, EngineError):
            await control.unload_adapter(name)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._folders[name] = folder
        self._proven[name] = found
        shutil.rmtree(found.folder, ignore_errors=True)

    async def unload(self, name: str) -> None:
        """Refuse new requests; its folder stays while requests run on it."""
        self._proven.pop(name, None)
        await self._server.control.unload_adapter(name)

    async def forget(self, name: str) -> None:
        """Delete the folder. Earlier, a server that had evicted the adapter would die reading it."""
        folder = self._folders.pop(name, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def model(self, name: str) -> str:
        """Its own name."""
        return name

    def holds(self, name: str) -> bool:
        """Adapters do not replace each other."""
        return name in self._proven

    def reset(self) -> None:
        """Forget what was there; the folders go too, nobody reads them any more."""
        self._folders.clear()
        self._proven.clear()
        self._base = None
        shutil.rmtree(self._work / "adapters", ignore_errors=True)

    def _check(self, name: str, found: WeightSet) -> None:
        if found.adapter is None or found.base is None:
            raise Unsupported(
                f"policy {name} has full weights and this engine serves adapters; start it without "
                "--lora-rank"
            )
        if int(found.adapter["rank"]) > self._rank:
            raise Unsupported(
                f"policy {name} has rank {found.adapter['rank']} and this engine was started with "
                f"--lora-rank {self._rank}"
            )
        if (beside := sets.beside_text(found.shapes)) is not None:
            # vLLM would leave them out without a word, and a probe of text would not notice.
            raise Unsupported(
                f"policy {name} adapts {beside}, and vLLM serves adapters of the text model's layers "
                "only; leave what reads images out of the adapter's targets"
            )
        if self._base is None:
            return
        base, shapes, _ = self._base
        if base != found.base:
            raise Full(
                f"policy {name} changes {found.base}, and this engine runs {base}; start another "
                "engine for this run"
            )
        if difference := sets.differing(shapes, found.shapes):
            raise BadWeights(f"policy {name} is not of this engine's adapters: {difference}")

    def _place(self, name: str, found: WeightSet) -> Path:
        """A folder under a path that no other version ever had: vLLM's cache keys are made of it."""
        folder = self._work / "adapters" / f"{name}-{found.sha256[:12]}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in found.folder.iterdir():
            if file.is_file() and file.name != manifests.NAME:
                os.link(file, folder / file.name)
        return folder

    async def _prove(self, name: str, found: WeightSet, dtype: str) -> None:
        if found.probe is None:
            return
        run, version = policy_version(name)
        older = [
            (policy_version(held)[1], known.probe)
            for held, known in self._proven.items()
            if policy_version(held)[0] == run and policy_version(held)[1] < version
        ]
        before = max(older, key=lambda pair: pair[0])[1] if older else None
        await probe.verify(self._server.control, name, name, dtype, found.probe, before)
