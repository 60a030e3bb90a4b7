"""`audit`: recompute a past step and compare it with what the ledger booked."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook.connect import STATE, services_for
from rollbook.output import console, print_json
from rollbook.stack.stack import Stack

if TYPE_CHECKING:
    from trainer.audit import Verdict


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(audit)


def audit(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    step: Annotated[
        int | None, typer.Argument(help="The step; without it all from the oldest checkpoint on.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Recompute a step from the ledger and the checkpoint before it, and compare the weights.

    Says `exact`, or which input is not what it was. Only reads; the exit code is 1 if a step is not
    exact.

    Example: `rollbook audit reverse3 12`
    """
    verdicts = _judge(run, step, state)
    if json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            console.print(_line(verdict), highlight=False, markup=False)
    return 0 if all(verdict.exact for verdict in verdicts) else 1


def _judge(run: str, step: int | None, state: Path) -> Sequence["Verdict"]:
    from trainer import audit as auditing  # brings torch

    def judge(services: Services) -> Sequence["Verdict"]:
        if step is not None:
            return [auditing.step(run, services, step)]
        return [*auditing.replay(run, services, first=auditing.oldest(run, services))]

    try:
        services = services_for(state)
    except ConfigError:
        if os.environ.get(VARIABLES["database_url"]) or not (state / "lock").exists():
            raise
        with Stack.up(state, environ=os.environ) as stack:
            return judge(stack.services)
    return judge(services)


def _line(verdict: "Verdict") -> str:
    head = f"step {verdict.step} of {verdict.run}, from checkpoint {verdict.checkpoint}"
    digest = f"{verdict.recomputed[:16]}"
    if verdict.exact:
        moved = "" if verdict.updated else ", no update"
        return f"{head}: exact ({verdict.groups} groups{moved}, weights {digest})"
    why = "; ".join(verdict.differences) or (
        "every input is the same: the kernels are not deterministic here, or the code that takes "
        "the step has changed"
    )
    return f"{head}: DIFFERS, recomputed {digest}, booked {verdict.booked[:16]}\n  {why}"
