"""The open sessions of a gateway process: opened by key, shared by their calls, dropped at will.

A session in which something ended midway (a client went away, the ledger refused a write) is
*doubtful*: once its calls have ended it is read from its book again, which is the ledger.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from activities.chat import Chat
from activities.gateway_session import LiveSession, Record
from activities.openai_errors import ApiError
from activities.sampler import Sampler
from activities.session import Beside, SessionRecorder
from activities.setups import Formats
from domain.config import RunConfig
from domain.errors import BudgetExhausted, Fenced
from domain.images import Image
from domain.messages import AttemptIn
from domain.rollouts import Segment
from storage import outbox, sessions
from storage.database import Ledger
from storage.sessions import Past, Session

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


class Book(Protocol):
    """Where sessions stand, whichever process serves them."""

    async def look_up(self, digest: bytes) -> Session | None:
        """The session of a key, open or not; None: no such key."""

    async def take_up(self, session: Session) -> tuple[RunConfig, Chat, Record, Past]:
        """What an open session needs to go on, and what is recorded of it."""

    async def cause(self, i: AttemptIn) -> Mapping[str, str]:
        """The span that an attempt's calls belong to, as a carrier; may be empty."""


class LedgerBook:
    """The sessions of attempts, in the ledger."""

    def __init__(self, sampler: Sampler, formats: Formats) -> None:
        """Nothing is read yet.

        Args:
            sampler: ledger, engine client and router.
            formats: configuration and chat format of runs.
        """
        self._ledger = sampler.ledger
        self._sampler = sampler
        self._formats = formats

    async def look_up(self, digest: bytes) -> Session | None:
        """As the ledger says now."""
        return await self._ledger.run(sessions.open_session, digest)

    async def take_up(self, session: Session) -> tuple[RunConfig, Chat, Record, Past]:
        """Read all that is recorded of the attempt."""
        config, chat = await self._formats.get(session.attempt.run)
        past = await self._ledger.run(sessions.past, session.attempt)
        recorder = SessionRecorder(
            self._sampler,
            config,
            session.attempt,
            session.started,
            recorded=past.segments,
            places=past.places,
            stop_ids=tuple(chat.stop_ids),
        )
        return config, chat, LedgerRecord(self._ledger, session, recorder), past

    async def cause(self, i: AttemptIn) -> Mapping[str, str]:
        """Its group's."""
        found = await self._ledger.run(outbox.traceparents, i.run, [i.group])
        return {"traceparent": found[0]} if found else {}


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """The calls of one attempt, in the ledger."""

    ledger: Ledger
    session: Session
    recorder: SessionRecorder

    @property
    def deadline_reached(self) -> bool:
        """The group's straggler deadline has passed."""
        return self.recorder.deadline_reached

    async def keep(self, image: Image) -> None:
        """In the store, and known to the ledger."""
        await self.recorder.keep(image)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        images: Sequence[str],
        beside: Beside,
    ) -> Segment:
        """Committed before it returns."""
        return await self.recorder.sample(
            prompt_ids, max_tokens=max_tokens, images=images, beside=beside
        )

    async def refuse(self, cause: str | None) -> None:
        """Told to the attempt, which decides how its program ended."""
        i, fence = self.session.attempt, self.session.started.fence
        await self.ledger.run(sessions.refuse, i, fence, cause)

    async def fail(self, detail: str) -> None:
        """Told to the attempt, which ends its program."""
        i, fence = self.session.attempt, self.session.started.fence
        await self.ledger.run(sessions.fail, i, fence, detail)


class Sessions:
    """All sessions of one process and event loop."""

    def __init__(self, book: Book) -> None:
        """Nothing is open yet; `book` holds all that is."""
        self.book = book
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
        found = await self.book.look_up(entry.digest)
        if found is None:
            return _unknown()
        if found.closed is not None:
            return closed(found.closed)
        return ApiError(503, f"another gateway writes for this session: {error}", again=True)

    async def _open(self, entry: Entry) -> LiveSession:
        session = await self.book.look_up(entry.digest)
        if session is None:
            raise _unknown()
        if session.closed is not None:
            raise closed(session.closed)
        config, chat, record, past = await self.book.take_up(session)
        return LiveSession(
            session, config, chat, record, past, delivered=frozenset(entry.delivered)
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
