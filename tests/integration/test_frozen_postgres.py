"""A Postgres that is frozen behind a living kernel: nothing answers, and no connection ends."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from psycopg.rows import dict_row

from storage import connections
from storage.connections import ALIVE, AsyncWatched, Silence, Watched
from storage.database import Ledger, Tx

LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_S", LIMIT_S)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def backend(tx: psycopg.Connection[dict[str, int]]) -> int:
    row = tx.execute("SELECT pg_backend_pid() AS pid").fetchone()
    assert row is not None
    return row["pid"]


def test_a_transaction_whose_server_freezes_is_tried_again_and_done_once(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(ledger_url, autocommit=True) as admin:
        admin.execute("CREATE TABLE ledger.done (at int)")
    tries: list[int] = []
    ledger = Ledger.open(ledger_url, pool=2, patience_s=20)
    with ExitStack() as stopped:

        def work(tx: Tx) -> int:
            tx.execute("INSERT INTO done VALUES (%s)", (len(tries),))
            tries.append(backend(tx))
            if len(tries) == 1:
                stopped.enter_context(frozen(tries[0]))
            tx.execute("SELECT 1")
            return len(tries)

        with caplog.at_level(logging.WARNING, "storage.database"):
            assert ledger.call(work) == 2
    assert "trying test_a_transaction" in caplog.text
    assert "has not answered for 1 s" in caplog.text
    ledger.close()
    with psycopg.connect(ledger_url) as look:  # woken, the first finds its client gone
        assert look.execute("SELECT at FROM ledger.done").fetchall() == [(1,)]


def test_patience_ends(ledger_url: str) -> None:
    ledger = Ledger.open(ledger_url, pool=1)

    def work(tx: Tx) -> None:
        with frozen(backend(tx)):
            tx.execute("SELECT 1")

    with pytest.raises(Silence, match="frozen"):
        ledger.call(work)
    assert ledger.call(backend) > 0  # the pool has replaced the connection
    ledger.close()


def test_a_commit_is_waited_for_no_longer_than_a_question(ledger_url: str) -> None:
    with Watched.connect(ledger_url, row_factory=dict_row, **ALIVE) as connection:
        pid = backend(connection)
        with frozen(pid), pytest.raises(Silence):
            connection.commit()
        assert connection.closed


def test_an_answer_that_takes_its_time_but_comes_is_no_silence(ledger_url: str) -> None:
    # Five parts, each sooner than the limit and together longer than it.
    slowly = "SELECT repeat('x', 100000), pg_sleep(0.4) FROM generate_series(1, 5)"
    with Watched.connect(ledger_url, row_factory=dict_row, **ALIVE) as connection:
        assert len(connection.execute(slowly).fetchall()) == 5


async def test_nobody_leads_on_a_connection_that_is_silent(ledger_url: str) -> None:
    connect = AsyncWatched.connect(ledger_url, autocommit=True, **ALIVE)
    async with await connect as connection:
        row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
        assert row is not None
        with frozen(int(row[0])), pytest.raises(Silence):
            await asyncio.wait_for(connection.execute("SELECT 1"), 20)
        assert connection.closed
