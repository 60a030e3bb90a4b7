"""`rollbook db`: the ledger's schema."""

import os
from typing import Annotated

import typer

from domain.errors import ConfigError
from rollbook.output import console, print_json
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
