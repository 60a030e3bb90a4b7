"""The open sessions of a gateway process: opened by key, shared by their calls, dropped at will.

A session in which something ended midway (a client went away, the ledger refused a write) is
*doubtful*: once its calls have ended it is read from the ledger again.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from activities.gateway_session import LiveSession
from activities.openai_api import ApiError
from activities.sampler import Sampler
from activities.setups import Formats
from domain.errors import BudgetExhausted, Fenced
from domain.messages import AttemptIn
from storage import sessions
from storage.database import Ledger

IDLE_S = 300.0
"""Seconds after which an unused session is dropped from memory; the ledger keeps it."""


@dataclass(slots=True)
class Entry:
    """A key's place in this process."""

    digest: bytes
    opened: LiveSession | None = None
    delivered: set[int] = field(default_factory=set)
    """Calls whose answers have arrived."""
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)
    change: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def live(self) -> LiveSession:
        """The session, while it is in use."""
        assert self.opened is not None
        return self.opened


class Sessions:
    """All sessions of one process and event loop."""

    def __init__(self, sampler: Sampler, formats: Formats) -> None:
        """Nothing is open yet.

        Args:
            sampler: ledger, engine client and router.
            formats: configuration and chat format of runs.
        """
        self.ledger: Ledger = sampler.ledger
        self._sampler = sampler
        self._formats = formats
        self._entries: dict[bytes, Entry] = {}
        self._pruned_at = time.monotonic()

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._entries)

    @asynccontextmanager
    async def use(self, digest: bytes, i: AttemptIn) -> AsyncIterator[Entry]:
        """The open session of a key, for one call.

        Args:
            digest: of the key.
            i: the attempt that the URL names.

        Raises:
            ApiError: 401 or 403: unknown, another attempt's, or closed.
            OperationalError, ObjectError: the ledger or the store is out of reach.
        """
        self._prune()
        entry = self._entries.setdefault(digest, Entry(digest))
        async with entry.change:
            try:
                while entry.opened is None or entry.opened.doubtful:
                    if not entry.users:
                        entry.opened = await self._open(entry)
                    else:
                        await entry.change.wait()
                if entry.opened.session.attempt != i:
                    raise _unknown()
            except BaseException:
                if not entry.users:
                    self._entries.pop(digest, None)
                raise
            entry.users += 1
        try:
            yield entry
        except (ApiError, BudgetExhausted):
            raise
        except BaseException:
            entry.live.doubtful = True
            raise
        finally:
            entry.users -= 1
            entry.used_at = time.monotonic()
            async with entry.change:
                entry.change.notify_all()

    async def doubt(self, entry: Entry, error: Fenced) -> ApiError:
        """What to say when the ledger refused a segment as another's."""
        entry.live.doubtful = True
        found = await self.ledger.run(sessions.open_session, entry.digest)
        if found is None:
            return _unknown()
        if found.closed is not None:
            return closed(found.closed)
        return ApiError(503, f"another gateway writes for this session: {error}", again=True)

    async def _open(self, entry: Entry) -> LiveSession:
        session = await self.ledger.run(sessions.open_session, entry.digest)
        if session is None:
            raise _unknown()
        if session.closed is not None:
            raise closed(session.closed)
        config, chat = await self._formats.get(session.attempt.run)
        past = await self.ledger.run(sessions.past, session.attempt)
        return LiveSession(
            session, config, chat, self._sampler, past, delivered=frozenset(entry.delivered)
        )

    def _prune(self) -> None:
        now = time.monotonic()
        if now - self._pruned_at < IDLE_S / 10:
            return
        self._pruned_at = now
        idle = [
            digest
            for digest, entry in self._entries.items()
            if not entry.users and not entry.change.locked() and now - entry.used_at > IDLE_S
        ]
        for digest in idle:
            del self._entries[digest]


def _unknown() -> ApiError:
    return ApiError(401, "no session has this key and URL", code="invalid_api_key")


def closed(how: str) -> ApiError:
    """The refusal of a session that may not sample any more."""
    return ApiError(403, f"this session {how}; nothing more is sampled", code="session_closed")
