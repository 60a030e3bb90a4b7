"""`rollbook db`: the ledger's schema."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer
from psycopg import conninfo

from domain.errors import ConfigError
from rollbook.connect import STATE, open_looking
from rollbook.output import console, print_json
from storage import reader as readers
from storage.database import check_schema
from storage.database import upgrade as upgrade_schema

app = typer.Typer(no_args_is_help=True, help="The ledger's schema.")

Url = Annotated[str | None, typer.Option(help="Default: ROLLBOOK_DATABASE_URL.")]


def _url(url: str | None) -> str:
    found = url or os.environ.get("ROLLBOOK_DATABASE_URL")
    if not found:
        raise ConfigError("no database given; set ROLLBOOK_DATABASE_URL or pass --url")
    return found


@app.command()
def upgrade(
    url: Url = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Bring the ledger's schema to the one this code needs.

    Example: `rollbook db upgrade --url postgresql://rollbook@localhost/rollbook`
    """
    upgrade_schema(_url(url))
    if json:
        print_json({"schema": "head"})
    else:
        console.print("the ledger's schema is up to date")


@app.command()
def check(
    url: Url = None, json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Refuse (exit code 2) when the schema is missing, older or newer than this code.

    Example: `rollbook db check`
    """
    check_schema(_url(url))
    if json:
        print_json({"schema": "matches"})
    else:
        console.print("the ledger's schema matches this code")


@app.command()
def reader(
    name: Annotated[str, typer.Option(help="Name of the role.")] = "rollbook_reader",
    password: Annotated[
        str | None,
        typer.Option(envvar="ROLLBOOK_READER_PASSWORD", help="Default: a new random one."),
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a role that can read the ledger and nothing else, and print its URL.

    Example: `psql "$(rollbook db reader)"`
    """
    chosen = password or secrets.token_hex(12)
    with open_looking(state) as looking:
        looking.ledger.call(readers.grant, name, chosen)
        url = reader_url(looking.services.database_url, name, chosen)
    if json:
        print_json({"url": url})
    else:
        print(url)


def reader_url(url: str, name: str, password: str) -> str:
    """The database's URL with the reader's name and password."""
    parts = conninfo.conninfo_to_dict(url)
    return (
        f"postgresql://{name}:{password}@{parts.get('host', 'localhost')}:{parts.get('port', 5432)}"
        f"/{parts.get('dbname', '')}"
    )
