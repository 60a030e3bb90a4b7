"""`stuck`: what does not move, and what each thing waits for."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from activities import waits
from domain.waits import Wait
from rollbook.connect import STATE, Looking, open_looking
from rollbook.output import console, print_json, print_table
from storage import runs as ledger_runs


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(stuck)


def stuck(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    silent: Annotated[
        float | None,
        typer.Option(help="Seconds without progress that count; default: groups.stuck_after."),
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What the run waits for, and each rollout that made no progress: on whom, since when.

    A rollout waits for an engine, a tool, its verifier, a worker; the trainer holds for a group, or
    for a publication; a queue that no worker polls is named within half a minute.

    Example: `rollbook stuck reverse3 --silent 30`
    """
    with open_looking(state) as looking:
        looking.ledger.call(ledger_runs.read, run)
        of_run, attempts = asyncio.run(_look(looking, run, silent))
    if json:
        print_json({"run": list(map(asdict, of_run)), "stuck": list(map(asdict, attempts))})
        return
    print_table(_rows(of_run), title=f"run {run} waits for", empty="nothing")
    print_table(_rows(attempts), title="stuck rollouts", empty="none")
    if looking.services.temporal_ui and attempts:
        console.print(
            f"in the Temporal UI: {looking.services.temporal_ui}/namespaces/"
            f"{looking.services.temporal_namespace}/workflows?query=RollbookRun%3D%22{run}%22+AND+"
            "RollbookStage%3D%22stuck%22",
            soft_wrap=True,
            highlight=False,
        )


async def _look(looking: Looking, run: str, silent: float | None) -> tuple[list[Wait], list[Wait]]:
    client = await looking.temporal()
    return (
        await waits.of_run(client, looking.ledger, run),
        await waits.of_attempts(client, looking.ledger, run, silent_s=silent),
    )


def _rows(found: Sequence[Wait]) -> list[dict[str, Any]]:
    return [
        {
            "what": wait.what,
            "waits for": wait.on,
            "seconds": None if wait.seconds is None else round(wait.seconds),
            "why": wait.detail,
            "workflow": wait.workflow_id or "",
        }
        for wait in found
    ]
