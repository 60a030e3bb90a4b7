"""A fresh ledger for each test: a database cloned from a migrated template.

After each test the view `ledger_violations` must be empty and every run's balance must close, so
every test of the ledger is also a test of its invariants.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psycopg
import pytest
from psycopg import conninfo, sql

from storage import database
from storage.database import Ledger, Tx

TEMPLATE = "rollbook_template"


@pytest.fixture(scope="session")
def ledger_template(postgres_url: str) -> str:
    """Name of a migrated database that nobody is connected to."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    database.upgrade(conninfo.make_conninfo(postgres_url, dbname=TEMPLATE))
    return TEMPLATE


@pytest.fixture
def ledger_url(postgres_url: str, ledger_template: str) -> Iterator[str]:
    """URL of an empty, migrated ledger of the test's own."""
    with database_of(postgres_url, ledger_template) as url:
        yield url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An open ledger, whose invariants are checked when the test ends."""
    with opened_ledger(ledger_url) as opened:
        yield opened


@pytest.fixture
def fresh_ledger(
    postgres_url: str, ledger_template: str
) -> Callable[[], AbstractContextManager[Ledger]]:
    """Opens ledgers like `ledger`, for tests that make more runs than one of them takes quickly."""

    @contextmanager
    def fresh() -> Iterator[Ledger]:
        with database_of(postgres_url, ledger_template) as url, opened_ledger(url) as opened:
            yield opened

    return fresh


@contextmanager
def database_of(postgres_url: str, template: str) -> Iterator[str]:
    name = f"ledger_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        yield conninfo.make_conninfo(postgres_url, dbname=name)
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def opened_ledger(url: str) -> Iterator[Ledger]:
    opened = Ledger.open(url, pool=6, application="tests")
    yield opened
    try:
        opened.call(check_invariants)
    finally:
        opened.close()


def check_invariants(tx: Tx) -> None:
    """Fail if a rule of the ledger is broken or a group has got lost."""
    violations = tx.execute("SELECT * FROM ledger_violations").fetchall()
    assert violations == []
    unbalanced = tx.execute(
        """
        SELECT * FROM balance WHERE nowhere > 0 OR drawn <> registered + submitted + queue
            + trained + cut + cancelled + abandoned + expired + quarantined
        """
    ).fetchall()
    assert unbalanced == []
