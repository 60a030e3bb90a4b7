"""`quarantine`: tasks that are not drawn because they keep failing, and their release."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollbook.connect import STATE, open_ledger
from rollbook.output import console, print_json, print_table
from storage import quarantine as ledger_quarantine


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(quarantine)


def quarantine(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    release: Annotated[
        list[str] | None, typer.Option(help="Draw this task again; may be repeated.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the tasks that keep failing and are not drawn, or release some.

    A task is quarantined when `groups.quarantine_after` of its groups were abandoned by its own
    failures, while rollouts of other tasks went well.

    Example: `rollbook quarantine reverse3 --release 107`
    """
    with open_ledger(state) as ledger:
        released = [
            (task, *ledger.call(ledger_quarantine.release, run, task)) for task in release or []
        ]
        rows = [asdict(each) for each in ledger.call(ledger_quarantine.listed, run)]
    if json:
        names = ("task", "groups_back", "groups_past")
        done = [dict(zip(names, each, strict=True)) for each in released]
        print_json({"released": done, "quarantine": rows})
        return
    for task, back, past in released:
        rest = f"; {past} belong to steps that are past and stay" if past else ""
        console.print(f"task {task} is released: {back} groups go back{rest}", highlight=False)
    print_table(rows, title=f"quarantine of run {run}", empty="no task")
