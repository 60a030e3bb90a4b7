"""One thread that owns torch: it admits waiting requests and steps each policy's batch in turn.

Other threads hand it work through `submit`, `abort`, `install` and `remove`, which take effect
between two steps, in the order they were called. Answers leave through `Request.deliver`.
"""

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from engine.batch import Batch
from engine.metrics import Metrics
from engine.policies import Policy
from engine.prefixes import Prefixes
from engine.refusals import Overloaded, PolicyFailed, UnknownPolicy
from engine.requests import Request, unstarted

log = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over the resident policies. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        max_batch: int = 64,
        max_waiting: int = 1024,
        kv_bytes: int = 2 << 30,
        prefix_bytes: int = 512 << 20,
        metrics: Metrics | None = None,
    ) -> None:
        """Start the thread.

        Args:
            max_batch: requests in progress at once, over all policies.
            max_waiting: requests that may wait beyond those; more are refused.
            kv_bytes: memory for KV of running requests. The oldest request of each policy runs
                whatever it needs.
            prefix_bytes: memory for KV of earlier requests; 0 retains none.
            metrics: counters to write to.
        """
        self.metrics = metrics or Metrics()
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._kv_bytes = kv_bytes
        self._changed = threading.Condition(threading.RLock())
        self._inbox: list[Callable[[], None]] = []
        self._outstanding: dict[str, int] = {}
        """Unanswered requests by policy, from `submit` on. Its keys are the batches."""
        self._routable: set[str] = set()
        self._closing = False
        self._prefixes = Prefixes(prefix_bytes)
        self._batches: dict[str, Batch] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()
        self._running = 0
        self._thread = threading.Thread(target=self._run, name="engine-torch", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still works; if not, this process must be replaced."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Requests in progress."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests accepted and not yet in progress."""
        with self._changed:
            return max(0, sum(self._outstanding.values()) - self._running)

    @property
    def kv_usage(self) -> float:
        """Share of `kv_bytes` in use."""
        return sum(b.slots.nbytes for b in list(self._batches.values())) / self._kv_bytes

    def unanswered(self, policy: str) -> int | None:
        """Unanswered requests of a policy; None when it is not here at all."""
        with self._changed:
            return self._outstanding.get(policy)

    def install(self, policy: Policy) -> None:
        """Make a policy routable."""
        batch = Batch(
            policy,
            prefixes=self._prefixes,
            metrics=self.metrics,
            room=lambda more: (
                more + sum(b.slots.nbytes for b in self._batches.values()) <= self._kv_bytes
            ),
        )
        with self._changed:
            self._routable.add(policy.name)
            self._outstanding.setdefault(policy.name, 0)
            self._post(lambda: self._batches.__setitem__(policy.name, batch))

    def remove(self, policy: str) -> None:
        """Stop routing to a policy. What it was asked before finishes on its weights."""
        with self._changed:
            self._routable.discard(policy)
            self._post(lambda: self._release([policy]))

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UnknownPolicy: its policy is not resident.
            Overloaded: the waiting queue is full.
        """
        with self._changed:
            if request.policy not in self._routable:
                raise UnknownPolicy(
                    f"policy {request.policy!r} is not resident; resident: "
                    f"{', '.join(sorted(self._routable)) or 'none'}"
                )
            total = sum(self._outstanding.values())
            if total >= self._max_batch + self._max_waiting:
                raise Overloaded(
                    f"{total} requests are unanswered (batch {self._max_batch}, queue "
                    f"{self._max_waiting}); try again later or on another engine"
                )
            self._outstanding[request.policy] += 1
            self._post(lambda: self._enqueue(request))

    def abort(self, ids: Collection[str]) -> None:
        """End all requests of these ids now, answering each with what it has."""
        wanted = frozenset(ids)
        with self._changed:
            self._post(lambda: self._stop(lambda r: r.id in wanted, deliver=True))

    def abort_all(self) -> None:
        """End every request now, answering each with what it has."""
        with self._changed:
            self._post(lambda: self._stop(lambda _: True, deliver=True))

    def cancel(self, request: Request) -> None:
        """Forget a request whose caller has gone."""
        with self._changed:
            self._post(lambda: self._stop(lambda r: r is request, deliver=False))

    def close(self) -> None:
        """Answer every request with what it has and end the thread."""
        self.abort_all()
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._closing or self._waiting or self._running):
                    self._changed.wait()
                if self._closing and not self._inbox:
                    return
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
            self._admit()
            for batch in list(self._batches.values()):
                if batch.size:
                    self._step(batch)

    def _step(self, batch: Batch) -> None:
        try:
            ended = batch.step()
        except (RuntimeError, ValueError, IndexError) as error:
            log.exception("policy %s failed", batch.policy.name)
            ended = batch.fail(PolicyFailed(f"policy {batch.policy.name}: {error}"))
        if ended:
            self._done(ended, running=len(ended))

    def _admit(self) -> None:
        while self._waiting and self._running < self._max_batch:
            _, _, request = heapq.heappop(self._waiting)
            self._running += 1
            self.metrics.admitted(request)
            self._batches[request.policy].add(request)

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.priority, next(self._arrivals), request))

    def _stop(self, wanted: Callable[[Request], bool], *, deliver: bool) -> None:
        started = [e for b in self._batches.values() for e in b.remove(wanted)]
        queued = [entry[2] for entry in self._waiting if wanted(entry[2])]
        self._waiting = [entry for entry in self._waiting if not wanted(entry[2])]
        heapq.heapify(self._waiting)
        stopped = started + [
            (request, unstarted(self._batches[request.policy].policy.version)) for request in queued
        ]
        for request, partial in stopped:
            self.metrics.ended(request, "abort")
            if deliver:
                request.deliver(partial)
        self._done([request for request, _ in stopped], running=len(started))

    def _done(self, requests: Sequence[Request], *, running: int) -> None:
        with self._changed:
            self._running -= running
            for request in requests:
                self._outstanding[request.policy] -= 1
            self._release({r.policy for r in requests})

    def _release(self, policies: Iterable[str]) -> None:
        """Let go of policies that are neither routed to nor owe an answer."""
        with self._changed:
            for name in policies:
                if name not in self._routable and self._outstanding.get(name) == 0:
                    del self._outstanding[name]
                    gone = self._batches.pop(name).policy
                    self._prefixes.drop(gone.run, gone.version)
