"""The ledger's connection: transactions, retries, threads, and the schema's revision.

Every function of `storage/` is synchronous, takes a `Tx` first and never commits: the caller owns
the transaction. Each protocol transaction is idempotent, so a lost connection, a deadlock or a
commit whose answer got lost is simply tried again, for as long as the caller's patience lasts.

Isolation is READ COMMITTED with explicit row locks, always in the order
runs → groups → queue → attempts, rows of one table in key order, and FOR NO KEY UPDATE (foreign
keys take KEY SHARE and must not conflict).
"""

import asyncio
import json
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

from domain.errors import SchemaMismatch
from storage.connections import ALIVE, Watched

Tx = psycopg.Connection[DictRow]
P = ParamSpec("P")
T = TypeVar("T")

MIGRATIONS = Path(__file__).resolve().parents[1] / "migrations"
REVISION_TABLE = "public.rollbook_revision"
SETTINGS = {
    "search_path": "ledger",
    "statement_timeout": "15s",
    "idle_in_transaction_session_timeout": "30s",
}
_TELL_EVERY_S = 30.0

log = logging.getLogger(__name__)


class Ledger:
    """A pool of connections to one ledger. Safe to share between threads and tasks."""

    def __init__(
        self, pool: ConnectionPool[Watched], threads: ThreadPoolExecutor, patience_s: float
    ):
        self._pool = pool
        self._threads = threads
        self.patience_s = patience_s
        """Seconds for which `call` and `run` try again after an operational error."""
        self._closing = threading.Event()

    @classmethod
    def open(
        cls, url: str, *, pool: int = 8, application: str = "rollbook", patience_s: float = 0
    ) -> Self:
        """Connect.

        Args:
            url: postgresql://user:password@host:port/database
            pool: connections at most, and threads of `run`.
            application: shown in pg_stat_activity.
            patience_s: seconds for which `call` and `run` try again after an operational error.

        Raises:
            psycopg.OperationalError: nothing answers at `url`.
        """
        settings = [f"-c {name}={value}" for name, value in SETTINGS.items()]
        connections = ConnectionPool(
            url,
            connection_class=Watched,
            kwargs=ALIVE
            | {
                "row_factory": dict_row,
                "options": " ".join([ALIVE["options"], *settings]),
                "application_name": application,
            },
            min_size=1,
            max_size=pool,
            timeout=10,
            # The pool tries ever more rarely. Giving up soon, it begins anew with the next caller:
            # otherwise the end of a long outage is noticed only after as long again.
            reconnect_timeout=10,
            check=_connected,
            open=False,
        )
        # Probe first: the pool itself would only report a time-out, not why.
        Watched.connect(url, connect_timeout=5).close()
        connections.open(wait=True, timeout=10)
        threads = ThreadPoolExecutor(max_workers=pool, thread_name_prefix="ledger")
        return cls(connections, threads, patience_s)

    @contextmanager
    def transaction(self) -> Iterator[Tx]:
        """BEGIN; COMMIT at the end of the block, ROLLBACK if it raises."""
        with self._pool.connection() as tx, tx.transaction():
            yield tx

    def call(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(tx, ...)` in one transaction, again after operational errors while patience lasts."""
        give_up = time.monotonic() + self.patience_s
        pause, told = 0.05, float("-inf")
        while True:
            try:
                with self.transaction() as tx:
                    return fn(tx, *args, **kwargs)
            except psycopg.OperationalError as error:
                now = time.monotonic()
                if now + pause > give_up or self._closing.is_set():
                    raise
                if now - told > _TELL_EVERY_S:
                    told = now
                    name = getattr(fn, "__qualname__", repr(fn))
                    log.warning("the ledger fails, trying %s again: %s", name, error)
            self._closing.wait(pause)
            pause = min(2 * pause, 2.0)

    async def run(
        self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`call` in a thread of this ledger's own: never blocks the event loop.

        A cancelled caller does not stop a transaction that has begun; it commits unobserved.
        """
        loop = asyncio.get_running_loop()
        work: Callable[[], T] = partial(self.call, fn, *args, **kwargs)
        return await loop.run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for running transactions and close all connections; nothing is tried again."""
        self._closing.set()
        self._threads.shutdown(wait=True)
        self._pool.close()


def _connected(connection: Tx) -> None:
    """Close and refuse a pooled connection that the server has ended: it said so, or hung up.

    A look at the socket costs no round trip, which every transaction would pay. Dead servers that
    leave their sockets open would only let a question hang.
    """
    socket = select.poll()
    socket.register(connection.fileno(), select.POLLIN)
    if socket.poll(0):
        connection.close()
        raise psycopg.OperationalError("the server has ended an idle connection")


def jsonb(value: Any) -> Jsonb:
    """A jsonb parameter. NaN and infinities, which JSON lacks, become the strings Postgres casts."""
    return Jsonb(_finite(value), dumps=partial(json.dumps, allow_nan=False))


def canonical(value: Any) -> bytes:
    """JSON with one spelling per value, to be hashed."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        case Mapping():
            return {str(key): _finite(item) for key, item in value.items()}
        case str() | bytes():
            return value
        case Sequence():
            return [_finite(item) for item in value]
        case _:
            return value


def upgrade(url: str) -> None:
    """Migrate the ledger to this code's schema; does nothing if it is there already.

    Raises:
        SchemaMismatch: a newer rollbook made it.
    """
    # Here alone: every worker imports this module, and none of them migrates (18 MB, 0.2 s).
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)  # it lists its own parts
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    _refuse_newer(_revision(url), _known())
    engine = create_engine(
        "postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool
    )
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    try:
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
    finally:
        engine.dispose()


def check_schema(url: str) -> None:
    """Refuse a ledger that this code does not fit.

    Raises:
        SchemaMismatch: the schema is missing, older (upgrade it) or newer (update rollbook).
    """
    known = _known()
    head = max(known)
    found = _revision(url)
    if found == head:
        return
    if found is None:
        raise SchemaMismatch("the database holds no ledger; run `rollbook db upgrade`")
    _refuse_newer(found, known)
    raise SchemaMismatch(
        f"the ledger's schema is at revision {found}, this code needs {head}; run "
        "`rollbook db upgrade`"
    )


def _known() -> set[str]:
    return {module.name.partition("_")[0] for module in MIGRATIONS.glob("versions/[0-9]*.py")}


def _refuse_newer(found: str | None, known: set[str]) -> None:
    if found is None or found in known:
        return
    raise SchemaMismatch(
        f"the ledger's schema is at revision {found}, which this code (at {max(known)}) does not "
        "know: a newer rollbook made it; update rollbook"
    )


def _revision(url: str) -> str | None:
    with Watched.connect(url, row_factory=dict_row, **ALIVE) as connection:
        known = connection.execute("SELECT to_regclass(%s) AS found", (REVISION_TABLE,)).fetchone()
        if known is None or known["found"] is None:
            return None
        query = sql.SQL("SELECT version_num FROM {}").format(
            sql.Identifier(*REVISION_TABLE.split("."))
        )
        row = connection.execute(query).fetchone()
        return None if row is None else str(row["version_num"])
