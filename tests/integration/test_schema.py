"""The schema exists three times and must be one: schema.sql, the migrations, tables.py."""

import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from alembic.script import ScriptDirectory
from psycopg import conninfo, sql
from sqlalchemy import create_engine

from domain.errors import SchemaMismatch
from rollbook.stack import postgres as wheel
from storage import database, tables

SCHEMA = Path(database.__file__).with_name("schema.sql")
DIALECT = create_engine("postgresql+psycopg://").dialect
UDT = {
    "TEXT": "text",
    "INTEGER": "int4",
    "BIGINT": "int8",
    "SMALLINT": "int2",
    "BOOLEAN": "bool",
    "BYTEA": "bytea",
    "JSONB": "jsonb",
    "TIMESTAMP WITH TIME ZONE": "timestamptz",
    "INTERVAL": "interval",
    "DOUBLE PRECISION": "float8",
    "INTEGER[]": "_int4",
    "BYTEA[]": "_sha256",
    "ledger.rollout_status": "rollout_status",
    "ledger.resubmit_cause": "resubmit_cause",
}


@pytest.fixture
def empty_database(postgres_url: str) -> Iterator[Callable[[], str]]:
    """Makes databases without a ledger."""
    made: list[str] = []

    def make() -> str:
        made.append(f"schema_{secrets.token_hex(6)}")
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(made[-1])))
        return conninfo.make_conninfo(postgres_url, dbname=made[-1])

    yield make
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        for name in made:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _dump(url: str) -> str:
    program = [
        str(wheel.binaries() / "pg_dump"),
        "--schema-only",
        "--schema=ledger",
        "--no-owner",
        url,
    ]
    text = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    # pg_dump guards its scripts with a random token.
    return re.sub(r"^\\(un)?restrict .*$", "", text, flags=re.MULTILINE)


def test_the_migrations_make_what_schema_sql_says(empty_database: Callable[[], str]) -> None:
    migrated, written = empty_database(), empty_database()
    database.upgrade(migrated)
    with psycopg.connect(written) as connection:
        connection.execute(SCHEMA.read_text(encoding="utf-8"))
    assert _dump(migrated) == _dump(written)
    assert "CREATE TABLE ledger.runs" in _dump(migrated)


def test_an_upgrade_of_a_current_ledger_changes_nothing(ledger_url: str) -> None:
    before = _dump(ledger_url)
    database.upgrade(ledger_url)
    database.check_schema(ledger_url)
    assert _dump(ledger_url) == before


def test_a_database_without_a_ledger_is_refused(empty_database: Callable[[], str]) -> None:
    with pytest.raises(SchemaMismatch, match="rollbook db upgrade"):
        database.check_schema(empty_database())


def test_a_newer_schema_is_refused(ledger_url: str) -> None:
    with psycopg.connect(ledger_url) as connection:
        connection.execute("UPDATE public.rollbook_revision SET version_num = '9999'")
    with pytest.raises(SchemaMismatch, match=r"9999.*update rollbook"):
        database.check_schema(ledger_url)


def test_an_older_schema_is_refused(
    empty_database: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = empty_database()
    database.upgrade(url)
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    for module in (database.MIGRATIONS / "versions").glob("*_*.*"):
        (folder / "versions" / module.name).write_bytes(module.read_bytes())
    head = ScriptDirectory(str(database.MIGRATIONS)).get_current_head()
    (folder / "versions" / "9999_next.py").write_text(
        f'revision = "9999"\ndown_revision = "{head}"\n', encoding="utf-8"
    )
    monkeypatch.setattr(database, "MIGRATIONS", folder)
    with pytest.raises(SchemaMismatch, match=f"revision {head}, this code needs 9999"):
        database.check_schema(url)


def test_the_file_of_a_migration_begins_with_its_revision() -> None:
    scripts = ScriptDirectory(str(database.MIGRATIONS))
    revisions = {script.revision: Path(script.path).name for script in scripts.walk_revisions()}
    assert all(name.startswith(f"{revision}_") for revision, name in revisions.items())
    assert scripts.get_current_head() == max(revisions)


def test_tables_py_has_the_columns_of_the_database(ledger_url: str) -> None:
    with psycopg.connect(ledger_url) as connection:
        rows = connection.execute(
            """
            SELECT c.table_name, c.column_name, c.udt_name, c.is_nullable = 'YES',
                EXISTS (SELECT 1 FROM information_schema.key_column_usage k
                    JOIN information_schema.table_constraints t
                        USING (constraint_schema, constraint_name)
                    WHERE t.constraint_type = 'PRIMARY KEY' AND k.table_schema = c.table_schema
                        AND (k.table_name, k.column_name) = (c.table_name, c.column_name))
            FROM information_schema.columns c
            JOIN pg_class p ON p.relname = c.table_name
                AND p.relnamespace = 'ledger'::regnamespace
            WHERE c.table_schema = 'ledger' AND p.relkind IN ('r', 'p') AND NOT p.relispartition
            """
        ).fetchall()
    declared = {
        (t.name, c.name, UDT[c.type.compile(dialect=DIALECT)], bool(c.nullable), c.primary_key)
        for t in tables.metadata.tables.values()
        for c in t.columns
    }
    assert declared == set(rows)
