"""Which policies a front answers for, and which requests run on each.

As in the built-in engine a name is used once: after `run@3` stood for some weights, no others may
take it. A server that died takes everything with it; what follows has a new incarnation.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from domain.ids import policy_version
from engine.incarnation import new_incarnation
from engine.refusals import Full, NameTaken, NotResident, Overloaded, UnknownPolicy
from engine.vllm.control import Crossing
from engine.vllm.server import Server
from engine.vllm.sets import Source
from engine.vllm.strategies import Strategy

log = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Requests that must not see new weights have so long to end by themselves."""
WATCH_S = 1.0
_FAILURES = 3
"""Missed health checks in a row of a server that is given up."""


@dataclass(eq=False, slots=True)
class Running:
    """A request at the server."""

    policy: str
    anchor: int
    """Oldest version whose KV it may extend."""
    computed_by: int
    """Oldest version that computed KV for it, retained KV apart."""
    crosses: bool = False
    """Weights are being replaced under it."""
    doubtful: bool = False
    """It ran under weights that were not proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MayCross:
    """What the run allows requests that run while a version is replaced."""

    kv_max_staleness: int = 0
    """How much older than the new version the KV may be that they go on with."""
    refill: bool = False
    """Beyond that: compute it again."""


class Residents:
    """Loads and unloads policies, one at a time, and counts what runs on them."""

    def __init__(
        self,
        strategy: Strategy,
        server: Server,
        source: Source,
        *,
        most: int,
        capabilities: Sequence[str],
    ) -> None:
        """Nothing is resident yet.

        Args:
            strategy: how versions come and go.
            server: the server they come to.
            source: where weights come from.
            most: requests at the server at once, running or waiting.
            capabilities: what it can do, by the names of `domain.capabilities`.
        """
        self.capabilities = tuple(capabilities)
        self.incarnation = new_incarnation()
        self.alive = True
        self._strategy = strategy
        self._server = server
        self._source = source
        self._most = most
        self._named: dict[str, str] = {}
        self._served: dict[str, str] = {}
        self._running: set[Running] = set()
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._drained = asyncio.Condition()

    @property
    def max_resident(self) -> int:
        """Policies held at once."""
        return self._strategy.max_resident

    @property
    def labelled(self) -> bool:
        """Whether the server's own version labels are about the policies here."""
        return self._strategy.replaces

    @property
    def running(self) -> int:
        """Requests at the server."""
        return len(self._running)

    def policies(self) -> dict[str, str]:
        """Weights digest of every policy that may be asked for."""
        return dict(self._served)

    async def load(self, name: str, manifest: str, sha256: str, may: MayCross | None) -> None:
        """Make a policy routable. Asking again for what is here does nothing.

        Args:
            name: RUN@VERSION.
            manifest: key of its weights' manifest.
            sha256: digest of the weights.
            may: what running requests of the same run may do meanwhile; None: they end first.

        Raises:
            ValueError: the name is not of the form RUN@VERSION.
            NameTaken, Full, BadWeights, Unsupported, EngineUnavailable, ObjectError.
        """
        policy_version(name)
        async with self._loading:
            known = self._named.get(name, sha256)
            if known != sha256:
                raise NameTaken(
                    f"policy {name!r} stands for weights {known} in this engine, not for "
                    f"{sha256}; new weights need a new version. If another ledger has a run of this "
                    "name, rename one; an engine that was told wrongly forgets it when it restarts"
                )
            if name in self._served:
                return
            self._ensure_slot(name)
            life = self.incarnation
            found = await asyncio.to_thread(self._source.fetch, manifest, sha256)
            try:
                await self._strategy.load(name, found, lambda: self._quieten(name, may))
                if life != self.incarnation:
                    raise NotResident(f"vLLM ended while it loaded {name}")
                if self._strategy.replaces:
                    self._served.clear()
                self._named[name] = self._served[name] = sha256
                log.info("policy %s is resident", name)
            except BaseException:
                if not self._open.is_set():
                    for request in self._running:
                        request.doubtful = True
                self._served = {n: s for n, s in self._served.items() if self._strategy.holds(n)}
                raise
            finally:
                for request in self._running:
                    request.crosses = False
                self._open.set()

    async def unload(self, name: str) -> bool:
        """Stop routing to a policy; whether it was routable. Running requests finish on it."""
        async with self._loading:
            if self._served.pop(name, None) is None:
                return False
            await self._strategy.unload(name)
            if not self._owing(name):
                await self._strategy.forget(name)
            return True

    @contextlib.asynccontextmanager
    async def request(self, name: str, kv_max_staleness: int) -> AsyncIterator[Running]:
        """Count one request at the server; waits while weights are being replaced.

        Raises:
            UnknownPolicy, NotResident: the policy is not here.
            Overloaded: too many requests already.
        """
        await self._open.wait()
        if name not in self._served:
            if name in self._named:
                raise NotResident(f"policy {name!r} is not resident any more")
            raise UnknownPolicy(
                f"policy {name!r} is not resident; resident: {', '.join(self._served) or 'none'}"
            )
        if len(self._running) >= self._most:
            raise Overloaded(f"{len(self._running)} requests run or wait already; try again")
        version = policy_version(name)[1]
        request = Running(name, version - kv_max_staleness, version)
        self._running.add(request)
        try:
            yield request
        finally:
            self._running.discard(request)
            async with self._drained:
                self._drained.notify_all()
            if name not in self._served and not self._owing(name):
                await self._strategy.forget(name)

    async def settled(self, request: Running) -> bool:
        """Whether the answer to a request may go out: not before the weights it met are proven."""
        if request.crosses:
            await self._open.wait()
        return not request.doubtful

    def model(self, name: str) -> str:
        """The server's name of a policy."""
        return self._strategy.model(name)

    async def watch(self) -> None:
        """Notice that the server ended or hangs, and begin a new life; until cancelled."""
        missed = 0
        while True:
            await asyncio.sleep(WATCH_S)
            self.alive = await self._server.alive()
            missed = 0 if self.alive else missed + 1
            if missed >= _FAILURES:
                log.error("vLLM does not answer any more: it is given up, with what it held")
                self._served.clear()
                self._named.clear()
                self._strategy.reset()
                self.incarnation = new_incarnation()
                await self._server.stop()
                self.alive, missed = True, 0

    def _ensure_slot(self, name: str) -> None:
        if self._strategy.replaces:
            return
        owing = {r.policy for r in self._running} - self._served.keys()
        held = [*self._served, *(f"{policy} (requests left)" for policy in sorted(owing))]
        if len(held) >= self.max_resident:
            raise Full(
                f"no slot for policy {name!r}: this engine holds {', '.join(held)} "
                f"(max_resident = {self.max_resident}); unload one of them first"
            )

    def _owing(self, name: str) -> bool:
        return any(request.policy == name for request in self._running)

    async def _quieten(self, name: str, may: MayCross | None) -> Crossing | None:
        """Let no new request in, and decide about those that run."""
        self._open.clear()
        run, version = policy_version(name)
        if may is not None and all(policy_version(r.policy)[0] == run for r in self._running):
            oldest = min((r.anchor for r in self._running), default=version)
            held = version - oldest <= may.kv_max_staleness
            if held or may.refill:
                for request in self._running:
                    request.crosses = True
                    if not held:
                        request.anchor = request.computed_by = version
                return "hold" if held else "refill"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S), self._drained:
                await self._drained.wait_for(lambda: not self._running)
        return None
