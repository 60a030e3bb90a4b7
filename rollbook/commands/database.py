"""`rollbook db`: the ledger's schema."""

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import psycopg
import typer
from psycopg import conninfo

from domain.errors import ConfigError
from rollbook.connect import STATE, database_url, ledger_at
from rollbook.output import print_json, say
from storage import reader as readers
from storage.database import check_schema
from storage.database import upgrade as upgrade_schema

app = typer.Typer(no_args_is_help=True, help="The ledger's schema.")

Url = Annotated[
    str | None,
    typer.Option(help="Default: ROLLBOOK_DATABASE_URL, or else the local stack's."),
]
State = Annotated[Path, typer.Option(help="Folder of the local stack.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@contextmanager
def _address(url: str | None, state: Path) -> Iterator[str]:
    try:
        if url is not None:
            yield url
        else:
            with database_url(state) as found:
                yield found
    except psycopg.Error as error:
        raise ConfigError(
            f"no connection to the database: {str(error).strip()}; check --url or "
            "ROLLBOOK_DATABASE_URL"
        ) from error


@app.command()
def upgrade(url: Url = None, state: State = STATE, json: Json = False) -> None:
    """Bring the ledger's schema to the one this code needs.

    Example: `rollbook db upgrade --url postgresql://rollbook@localhost/rollbook`
    """
    with _address(url, state) as address:
        upgrade_schema(address)
    if json:
        print_json({"schema": "matches"})
    else:
        say("the ledger's schema is up to date")


@app.command()
def check(url: Url = None, state: State = STATE, json: Json = False) -> None:
    """Refuse (exit code 2) when the schema is missing, older or newer than this code.

    Example: `rollbook db check`
    """
    with _address(url, state) as address:
        check_schema(address)
    if json:
        print_json({"schema": "matches"})
    else:
        say("the ledger's schema matches this code")


@app.command()
def reader(
    name: Annotated[str, typer.Option(help="Name of the role.")] = "rollbook_reader",
    password: Annotated[
        str | None,
        typer.Option(envvar="ROLLBOOK_READER_PASSWORD", help="Default: a new random one."),
    ] = None,
    silent: Annotated[bool, typer.Option(help="Print nothing: logs should not know it.")] = False,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Make a role that can read the ledger and nothing else, and print its URL.

    Example: `psql "$(rollbook db reader)"`
    """
    chosen = password or secrets.token_hex(12)
    with database_url(state) as address, closing(ledger_at(address, own=False)) as ledger:
        ledger.call(readers.grant, name, chosen)
        url = reader_url(address, name, chosen)
    if silent:
        return
    if json:
        print_json({"url": url})
    else:
        print(url)


def reader_url(url: str, name: str, password: str) -> str:
    """The database's URL with the reader's name and password."""
    parts = conninfo.conninfo_to_dict(url)
    place = f"{parts.pop('host', 'localhost')}:{parts.pop('port', 5432)}/{parts.pop('dbname', '')}"
    parts.pop("user", None)
    parts.pop("password", None)
    rest = f"?{urlencode(parts)}" if parts else ""  # sslmode and the like
    return f"postgresql://{name}:{quote(password, safe='')}@{place}{rest}"
