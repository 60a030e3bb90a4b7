"""Which policies this process holds.

A name is used once in a process's life: after `run@3` was loaded with some weights, no others may
take that name, not even once it is unloaded. So no answer, cached KV or acknowledgement can be
about weights other than those its name says.
"""

import asyncio

from domain import failpoints
from domain.ids import policy_version
from engine.incarnation import new_incarnation
from engine.refusals import Full, NameTaken
from engine.scheduler import Scheduler
from engine.weights import Loader


class Residents:
    """Loads and unloads policies, one at a time. Used by the event loop only."""

    def __init__(self, loader: Loader, scheduler: Scheduler, *, max_resident: int) -> None:
        self.max_resident = max_resident
        self.incarnation = new_incarnation()
        self._loader = loader
        self._scheduler = scheduler
        self._named: dict[str, str] = {}
        self._served: dict[str, tuple[str, int, int]] = {}
        self._loading = asyncio.Lock()

    def policies(self) -> dict[str, str]:
        """Weights digest of every routable policy."""
        return {name: sha256 for name, (sha256, _, _) in self._served.items()}

    def limits(self, name: str) -> tuple[int, int] | None:
        """Vocabulary and positions of a routable policy."""
        served = self._served.get(name)
        return served and (served[1], served[2])

    async def load(self, name: str, manifest: str, sha256: str) -> None:
        """Make a policy routable. Asking again for what is here does nothing.

        Raises:
            ValueError: the name is not of the form RUN@VERSION.
            NameTaken: the name stands for other weights.
            Full: there is no slot for it.
            BadWeights, Unsupported, ObjectError: see `Loader.load`.
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
            held = self._held()
            if len(held) >= self.max_resident:
                raise Full(
                    f"no slot for policy {name!r}: this engine holds {', '.join(held)} "
                    f"(max_resident = {self.max_resident}); unload one of them first"
                )
            policy = await asyncio.to_thread(self._loader.load, name, manifest, sha256)
            failpoints.reach("load_fetched")
            self._named[name] = sha256
            self._served[name] = (sha256, policy.vocabulary, policy.positions)
            self._scheduler.install(policy)
            failpoints.reach("load_done")

    def unload(self, name: str) -> bool:
        """Stop routing to a policy; whether it was routable. Running requests finish on it."""
        if self._served.pop(name, None) is None:
            return False
        self._scheduler.remove(name)
        return True

    def _held(self) -> list[str]:
        """Routable policies, and unloaded ones that still owe answers: both hold memory."""
        owing = (
            f"{name} ({left} requests left)"
            for name in self._named
            if name not in self._served and (left := self._scheduler.unanswered(name)) is not None
        )
        return [*self._served, *owing]
