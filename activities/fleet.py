"""The inference engines: which are alive, which versions each must hold, and making them hold them.

An engine is alive while its health is seen; an engine that restarted has a new incarnation and no
acknowledgements. It takes traffic for a version once it has acknowledged that version's digest.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from activities.inference import Crossing, EngineClient, Health
from activities.ledger import AWAY
from domain import failpoints
from domain.capabilities import missing
from domain.config import RunConfig
from domain.errors import (
    ConfigError,
    DigestMismatch,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    RollbookError,
)
from domain.ids import policy_name, policy_version
from storage import census, evaluations, runs, versions
from storage.database import Ledger

logger = logging.getLogger(__name__)

ALIVE_S = 10.0
"""An engine that was not seen for so long is not waited for and gets no requests."""


async def load(ledger: Ledger, engines: EngineClient, run: str, version: int, engine: str) -> None:
    """Make one engine hold one version, and record its acknowledgement.

    Raises:
        EngineUnavailable: no answer, no free slot, or it restarted meanwhile: try again.
        EngineRefused: the weights are bad, the name stands for other weights, or the engine cannot
            do what the run needs.
        DigestMismatch, WrongVersion: it loaded other weights.
    """
    weights = await ledger.run(versions.weights, run, version)
    name = policy_name(run, version)
    health = await engines.health(engine)
    config = (await ledger.run(runs.read, run)).config
    lacks = missing(config, max_resident=health.max_resident, capabilities=health.capabilities)
    if lacks:
        raise EngineRefused(f"engine {engine} cannot sample for run {run}: {'; '.join(lacks)}")
    await _make_room(ledger, engines, engine, health, name)
    incarnation = await engines.load(
        engine,
        name,
        weights.manifest_key,
        weights.sha256.hex(),
        crossing=_crossing(config),
    )
    failpoints.reach("load_unacknowledged")
    if health.max_resident == 1:
        await _forget_lost(ledger, engines, engine, incarnation)
    acknowledged = await ledger.run(
        versions.acknowledge, run, engine, incarnation, version, weights.sha256
    )
    if not acknowledged:
        raise EngineUnavailable(
            f"engine {engine} holds {name} but has restarted or was not seen yet; trying again"
        )


async def _forget_lost(
    ledger: Ledger, engines: EngineClient, engine: str, incarnation: int
) -> None:
    """Take back the acknowledgement of what the engine holds no more.

    Its one slot was given to another version, or somebody else unloaded it. In this order: what is
    acknowledged now and missing from a health seen later is really gone.
    """
    known = await ledger.run(census.acknowledged, engine, incarnation)
    held = (await engines.health(engine)).policies
    for name in known - held.keys():
        await ledger.run(
            versions.unloaded, policy_version(name)[0], engine, policy_version(name)[1]
        )


def _crossing(config: RunConfig) -> Crossing | None:
    """Rollouts sampled segment by segment may meet a new version inside a segment too."""
    if config.sampling.policy == "trajectory":
        return None
    cache = config.sampling.kv_cache
    return Crossing(kv_max_staleness=cache.max_staleness, refill=cache.on_limit == "refill")


async def _make_room(
    ledger: Ledger, engines: EngineClient, engine: str, health: Health, name: str
) -> None:
    """If no slot is free, unload what no run needs, then older versions that nobody pins.

    An engine with one slot swaps. A version that is only kept for an evaluation yields last. What
    another run serves or samples, or a publication is loading, stays. So does what is newer than the
    version to load: whoever asks for the older one read the ledger before the newer was served.
    """
    if name in health.policies:
        return
    surplus = len(health.policies) + 1 - health.max_resident
    if surplus <= 0:
        return
    wanted = await ledger.run(census.wanted)
    pinned = await ledger.run(census.pinned)
    run, version = policy_version(name)
    idle = [held for held in health.policies if _is_ours(held) and held not in pinned]
    spare = [held for held in idle if wanted.get(held, "keep") == "keep"]
    swapped = [
        held
        for held in idle
        if wanted.get(held) == "load"
        and policy_version(held)[0] == run
        and policy_version(held)[1] < version
    ]
    found = sorted(spare) + sorted(swapped)
    if len(found) < surplus:
        kept = await ledger.run(evaluations.yielding)
        found += sorted(kept & health.policies.keys() - {name})
    for held in found[:surplus]:
        await ledger.run(evaluations.let_go, *policy_version(held))
        await unload(ledger, engines, engine, held)


async def unload(ledger: Ledger, engines: EngineClient, engine: str, name: str) -> None:
    """Take one version from an engine: first out of the routes, then out of its memory."""
    run, version = policy_version(name)
    await ledger.run(versions.unloaded, run, engine, version)
    await engines.unload(engine, name)


@dataclass
class Fleet:
    """Keeps the configured engines as the ledger wants them. One round at a time."""

    ledger: Ledger
    engines: EngineClient
    urls: Sequence[str]
    only: str | None = None
    """The run these engines were started for; None: they serve every run of the ledger."""
    _loading: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)
    """Runs whose policies some engine has held."""
    _trouble: dict[str, str] = field(default_factory=dict)
    """What was last said of each engine, so that it is said once."""

    async def tend(self) -> None:
        """See every engine once, and start to mend those that lack or hoard versions."""
        await asyncio.gather(*(self._tend_engine(url) for url in self.urls))

    async def retire(self) -> None:
        """Let go of superseded versions that nothing pins; the next rounds unload them."""
        for run in await self.ledger.run(census.runs_to_tend, sorted(self._held)):
            await self.ledger.run(versions.retire, run)

    def _serves(self, run: str) -> bool:
        return self.only is None or run == self.only

    async def stop(self) -> None:
        """Give up what is loading; engines finish or drop it by themselves."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        self._loading.clear()

    async def _tend_engine(self, url: str) -> None:
        try:
            health = await self.engines.health(url)
        except EngineError as error:
            self._say(url, f"is not seen: {error}")
            return
        held = {policy_version(name)[0] for name in health.policies if _is_ours(name)}
        self._held |= held
        for run in filter(self._serves, await self.ledger.run(census.runs_to_tend, sorted(held))):
            await self.ledger.run(
                versions.see_engine, run, url, health.incarnation, health.max_resident, ALIVE_S
            )
        mending = self._loading.get(url)
        if mending is None or mending.done():
            self._loading[url] = asyncio.create_task(self._mend(url, health))

    async def _mend(self, url: str, health: Health) -> None:
        try:
            # Read after the health: what was loaded since then is not taken for superfluous.
            wanted = await self.ledger.run(census.wanted)
            for name in await self._superfluous(health.policies.keys() - wanted.keys()):
                await unload(self.ledger, self.engines, url, name)
            acknowledged = await self.ledger.run(census.acknowledged, url, health.incarnation)
            if acknowledged - health.policies.keys():
                await _forget_lost(self.ledger, self.engines, url, health.incarnation)
                acknowledged = await self.ledger.run(census.acknowledged, url, health.incarnation)
            refusals: list[str] = []
            for name, need in wanted.items():
                run, version = policy_version(name)
                if need == "load" and name not in acknowledged and self._serves(run):
                    try:
                        await load(self.ledger, self.engines, run, version, url)
                    except (EngineRefused, DigestMismatch, ConfigError) as error:  # others are well
                        refusals.append(str(error))
            told = "; ".join(refusals)
            self._say(url, f"is not as it should be: {told}" if told else "")
        except (RollbookError, *AWAY) as error:
            self._say(url, f"is not as it should be: {error}")

    async def _superfluous(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are policies of this ledger; another one may use the engine too."""
        ours = {name: policy_version(name)[0] for name in names if _is_ours(name)}
        known = await self.ledger.run(census.known_runs, sorted(set(ours.values()))) if ours else ()
        return sorted(name for name, run in ours.items() if run in known)

    def _say(self, url: str, trouble: str) -> None:
        if trouble and trouble != self._trouble.get(url):
            logger.warning("engine %s %s", url, trouble)
        elif not trouble and self._trouble.get(url):
            logger.info("engine %s is well again", url)
        self._trouble[url] = trouble


def _is_ours(name: str) -> bool:
    """Whether rollbook gave this name; an engine may hold models of other owners."""
    try:
        policy_version(name)
    except ValueError:
        return False
    return True
