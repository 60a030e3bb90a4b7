"""The trainer's lease: taken over at start, renewed by a thread with a connection of its own.

The lease only tells others when they may take over; what keeps a zombie out is the epoch that every
transaction compares. So a renewal that fails because Postgres is away is merely tried again, and
one that finds another epoch ends this process.
"""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psycopg

from domain import holders
from domain.errors import Fenced, RunHeld
from storage import runs
from storage.database import Ledger

LEASE_S = 30.0
_RENEWALS = 6
"""Renewals within one lease: so many in a row must fail before another trainer may take over."""

log = logging.getLogger(__name__)


class Lease:
    """Held while the context lasts."""

    def __init__(self, ledger: Ledger, run: str, epoch: int, *, lease_s: float = LEASE_S) -> None:
        self._ledger = ledger
        self._run, self._epoch, self._lease_s = run, epoch, lease_s
        self._over = threading.Event()
        self._lost: Fenced | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def check(self) -> None:
        """Raise if the run was lost.

        Raises:
            Fenced: another trainer has taken over.
        """
        if self._lost is not None:
            raise self._lost

    def _renew(self) -> None:
        while not self._over.wait(self._lease_s / _RENEWALS):
            try:
                self._ledger.call(runs.renew, self._run, self._epoch, lease_s=self._lease_s)
            except Fenced as error:
                self._lost = error
                return
            except psycopg.OperationalError as error:
                log.warning("could not renew the lease of %s: %s", self._run, error)


def acquire(
    ledger: Ledger,
    run: str,
    holder: str,
    *,
    force: bool,
    lease_s: float,
    stop: Callable[[], bool],
) -> int:
    """Take the run and return its next epoch; waits for a lease that nobody renews any more.

    A holder on this host whose process is gone is not waited for.

    Args:
        ledger: where the run is.
        run: its name.
        holder: who takes it, as `host:pid`.
        force: do not wait for a holder that is alive.
        lease_s: how long others must wait after this process died.
        stop: asked while waiting; True gives up.

    Raises:
        RunHeld: a live trainer holds the run.
    """
    give_up = time.monotonic() + 1.5 * max(lease_s, LEASE_S)
    while True:
        present = ledger.call(runs.holder, run)
        dead = present is not None and holders.is_gone(present)
        try:
            return ledger.call(runs.take_over, run, holder, lease_s=lease_s, force=force or dead)
        except RunHeld as held:
            if stop() or time.monotonic() > give_up:
                raise
            log.info("waiting for the lease: %s", held)
        time.sleep(1.0)
