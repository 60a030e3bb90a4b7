"""A database role that may read the ledger and nothing else, for dashboards and other people's tools."""

from psycopg import sql

from domain.errors import ConfigError
from storage.database import Tx

HIDDEN = ("gateway_keys",)
"""Tables a reader has no business with."""


def grant(tx: Tx, role: str, password: str) -> None:
    """Make (or remake) the login role `role`: it reads all views and tables of the ledger.

    Every transaction of it starts read-only, and it has no right to write if it changes that.
    Statements longer than a minute are stopped. Needs a connection that may create roles.

    Raises:
        ConfigError: the name or the password cannot be used.
    """
    if not role.replace("_", "a").isalnum() or role == str(_value(tx, "SELECT current_user AS v")):
        raise ConfigError(f"{role!r} cannot be a reader's name; use letters, digits and _")
    if not password:
        raise ConfigError("a reader needs a password")
    name = sql.Identifier(role)
    known = _value(tx, "SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = %s) AS v", role)
    verb = sql.SQL("ALTER" if known else "CREATE")
    tx.execute(
        sql.SQL(
            "{} ROLE {} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {}"
        ).format(verb, name, sql.Literal(password))
    )
    for setting in (
        "search_path = ledger",
        "default_transaction_read_only = on",
        "statement_timeout = '60s'",
    ):
        tx.execute(sql.SQL("ALTER ROLE {} SET ").format(name) + sql.SQL(setting))
    tx.execute(sql.SQL("GRANT USAGE ON SCHEMA ledger TO {}").format(name))
    tx.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA ledger TO {}").format(name))
    # What later migrations and runs add, when the same owner makes it.
    tx.execute(
        sql.SQL("ALTER DEFAULT PRIVILEGES IN SCHEMA ledger GRANT SELECT ON TABLES TO {}").format(
            name
        )
    )
    for table in HIDDEN:
        tx.execute(
            sql.SQL("REVOKE ALL ON {} FROM {}").format(sql.Identifier("ledger", table), name)
        )


def _value(tx: Tx, query: str, *args: object) -> object:
    row = tx.execute(query.encode(), args).fetchone()
    assert row is not None
    return row["v"]
