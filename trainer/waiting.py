"""Every wait of the trainer: what for, how long, and until when it is worth it.

A pause grows from 20 to 500 ms while nothing changes. The reason goes to the log when it changes
and every half minute, the seconds go into the step's record, by kind. A wait ends early when the
process is asked to stop or has lost its run.
"""

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential_jitter,
)

from domain.errors import ObjectError

T = TypeVar("T")
Kind = Literal["groups", "hold", "paused", "publish", "resident_limit", "storage"]

SHORTEST_S, LONGEST_S = 0.02, 0.5
_TELL_EVERY_S = 30.0
HELD_LONG_S = 300.0
"""Seconds of one hold after which a person should look at the group that binds it."""

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The process was asked to stop while it waited."""


class Lease(Protocol):
    """What tells a waiting trainer that it has lost its run: `trainer.lease.Lease`."""

    def check(self) -> None:
        """Raise Fenced if it has."""


class Unfenced:
    """For readers, who hold no run that they could lose."""

    def check(self) -> None:
        """Nothing can be lost."""


class Waits:
    """The waits of one trainer process."""

    def __init__(self, stop: Callable[[], bool], lease: Lease, *, patience_s: float) -> None:
        self._stop = stop
        self._lease = lease
        self.patience_s = patience_s
        self._seconds: dict[str, float] = {}
        self._pause = SHORTEST_S
        self._reason: tuple[str, str] | None = None
        self._since = self._told = 0.0

    def check(self) -> None:
        """Whether to go on at all.

        Raises:
            Stopped: the process was asked to stop.
            Fenced: another trainer has taken over.
        """
        self._lease.check()
        if self._stop():
            raise Stopped

    def pause(self, kind: Kind, reason: str) -> float:
        """Sleep once for this reason; returns for how many seconds it has been the only kind.

        Raises:
            Stopped, Fenced: as `check`.
        """
        self.check()
        now = time.monotonic()
        if self._reason is None or self._reason[0] != kind:
            self._since = self._told = now
        elif (kind, reason) != self._reason or now - self._told > _TELL_EVERY_S:
            level = logging.INFO if now - self._since > 1.0 else logging.DEBUG
            if kind == "hold" and now - self._since > HELD_LONG_S:
                level = logging.WARNING
            log.log(level, "waiting for %s (%.0f s): %s", kind, now - self._since, reason)
            self._told = now
        self._reason = (kind, reason)
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, LONGEST_S)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time.monotonic() - now
        return time.monotonic() - self._since

    def over(self) -> None:
        """The wait has ended: the next one starts with the shortest pause."""
        if self._reason is not None and (waited := time.monotonic() - self._since) > 1.0:
            log.info("waited %.1f s for %s", waited, self._reason[0])
        self._pause, self._reason = SHORTEST_S, None

    def take(self) -> dict[str, float]:
        """Seconds waited by kind since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def outlast(self, act: Callable[[], T]) -> T:
        """Run something on the object store, again while it is out, up to the limit.

        Raises:
            ObjectError: it is still out after `patience_s` seconds; missing objects and wrong
                digests are never retried.
        """

        def tell(call: RetryCallState) -> None:
            error = call.outcome.exception() if call.outcome else None
            log.warning("the object store fails, trying again: %s", error)
            self._lease.check()

        started = time.monotonic()
        retrying = Retrying(
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential_jitter(multiplier=0.2, max=5.0),
            retry=retry_if_exception(lambda error: type(error) is ObjectError),
            before_sleep=tell,
            reraise=True,
        )
        result = retrying(act)
        if retrying.statistics.get("attempt_number", 1) > 1:
            outage = time.monotonic() - started
            self._seconds["storage"] = self._seconds.get("storage", 0.0) + outage
        return result
