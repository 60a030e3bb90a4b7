"""`report`: one HTML page about a run."""

from pathlib import Path
from typing import Annotated

import typer

from rollbook.connect import STATE, open_ledger
from rollbook.output import console, print_json


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(report)


def report(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    out: Annotated[Path | None, typer.Option(help="The file; default: RUN.html.")] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write one self-contained HTML page: reward, lag, waiting, lengths, mismatch, a timeline.

    Example: `rollbook report reverse3 --out report.html`
    """
    from rollbook.report import page

    path = out or Path(f"{run}.html")
    with open_ledger(state) as ledger:
        path.write_text(ledger.call(page.render, run), encoding="utf-8")
    if json:
        print_json({"report": str(path.resolve())})
    else:
        console.print(f"{path.resolve()}", highlight=False, soft_wrap=True)
