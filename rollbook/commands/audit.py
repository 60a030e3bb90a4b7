"""`audit`: recompute a past step and compare it with what the ledger booked."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domain.errors import ConfigError, LedgerError
from domain.services import VARIABLES, Services
from rollbook.connect import STATE, services_for
from rollbook.launch import torchrun
from rollbook.output import console, print_json
from rollbook.root import ROOT
from rollbook.stack.stack import Stack
from storage import runs
from storage.database import Ledger

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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Recompute a step from the ledger and the checkpoint before it, and compare the weights.

    Says `exact`, or which input is not what it was. Only reads; the exit code is 1 if a step is not
    exact. A run of several ranks is recomputed by as many processes on this machine.

    Example: `rollbook audit reverse3 12`
    """
    verdicts = _judge(run, step, state)
    if "RANK" in os.environ:  # one of the processes that this command started
        if os.environ["RANK"] == "0":
            print_json([asdict(verdict) for verdict in verdicts])
        return
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            console.print(_line(verdict), highlight=False, markup=False)
    raise typer.Exit(0 if all(verdict.exact for verdict in verdicts) else 1)


def _judge(run: str, step: int | None, state: Path) -> Sequence["Verdict"]:
    from trainer import audit as auditing  # brings torch

    def judge(services: Services) -> Sequence["Verdict"]:
        ranks = 1 if "RANK" in os.environ else _ranks(run, services)
        first = auditing.oldest(run, services)
        if step is not None and step < first:
            raise LedgerError(
                f"step {step} of run {run} cannot be recomputed: the oldest checkpoint that is kept "
                f"is {first}; audit a step from there on, or keep more of them (checkpoint.keep)"
            )
        if ranks > 1:
            arguments = [run] if step is None else [run, str(step)]
            told = _told(arguments, services, state, ranks)
            return [auditing.Verdict(**v | {"differences": tuple(v["differences"])}) for v in told]
        if step is not None:
            return [auditing.step(run, services, step, environ=os.environ)]
        return [*auditing.replay(run, services, first=first, environ=os.environ)]

    try:
        services = services_for(state)
    except ConfigError:
        if os.environ.get(VARIABLES["database_url"]) or not (state / "lock").exists():
            raise
        with Stack.up(state, environ=os.environ) as stack:
            return judge(stack.services)
    return judge(services)


def _ranks(run: str, services: Services) -> int:
    """Trainer processes of the run."""
    ledger = Ledger.open(services.database_url, pool=1, application="rollbook audit")
    with closing(ledger):
        return ledger.call(runs.read, run).config.trainer.ranks


def _told(
    arguments: Sequence[str], services: Services, state: Path, ranks: int
) -> list[dict[str, Any]]:
    """The verdicts of this command in several processes.

    Raises:
        LedgerError: they could not come to any; what they said is on stderr.
    """
    command = [sys.executable, *torchrun(ranks), "-m", "rollbook", "audit", *arguments]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [*command, "--json", "--state", str(state)],
        env=os.environ | services.environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise LedgerError(
            f"the {ranks} processes that recompute run {arguments[0]} failed (exit code "
            f"{done.returncode}); what they said stands above"
        )
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


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
