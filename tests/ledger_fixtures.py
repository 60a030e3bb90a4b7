"""A fresh ledger for each test: a database cloned from a migrated template.

After each test the view `ledger_violations` must be empty and every run's balance must close, so
every test of the ledger is also a test of its invariants.
"""

import secrets
from collections.abc import Iterator

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
    name = f"ledger_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(ledger_template)
            )
        )
        url = conninfo.make_conninfo(postgres_url, dbname=name)
        yield url
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An open ledger, whose invariants are checked when the test ends."""
    opened = Ledger.open(ledger_url, pool=6, application="tests")
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
