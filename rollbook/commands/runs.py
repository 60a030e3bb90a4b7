"""`run`, `resume`, `create`, `pause` and `unpause`: the life of a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from domain import holders
from domain.config import RunConfig
from domain.errors import ConfigError, RunExists, RunHeld
from domain.risks import acknowledged
from domain.services import VARIABLES
from domain.shares import other_bits
from rollbook import attend, preflight
from rollbook.commands.stack import facts, show_stack
from rollbook.connect import STATE, check_external_ledger, ledger_of, open_ledger
from rollbook.output import command, print_event, print_json, say
from rollbook.stack.stack import Stack
from storage import datasets, fork, reports
from storage import runs as ledger_runs
from storage.database import Ledger, Tx
from storage.runs import Run

State = Annotated[Path, typer.Option(help="Folder of the local stack, its data and logs.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Events = Annotated[
    bool, typer.Option("--json", help="Print JSON lines: an event for each step and the end.")
]
Config = Annotated[Path, typer.Argument(help="Run configuration (TOML).")]
Name = Annotated[str, typer.Argument(help="Name of the run.")]

_FORK_S = 30.0
"""Lease of a fork: as long as its one transaction may take."""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for each in (run, resume, create, pause, unpause):
        app.command()(each)


def run(
    config: Config,
    name: Annotated[str | None, typer.Option(help="Instead of the name in the file.")] = None,
    fresh_name: Annotated[
        bool,
        typer.Option(
            "--fresh-name",
            help="Number the name if a run of that name exists (reverse3, reverse3-2).",
        ),
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(help="Trainer processes, instead of trainer.ranks in the file.")
    ] = None,
    state: State = STATE,
    json: Events = False,
) -> None:
    """Create a run and train it to its end, with everything it needs.

    Starts the local stack unless the environment names services, the engine, the workers and the
    trainer; shows progress; stops what it started. Ctrl-C checkpoints and closes the run; `rollbook
    resume NAME` goes on.

    Example: `rollbook run examples/reverse3.toml`
    """
    loaded = RunConfig.load(config)
    if name is not None:
        loaded = RunConfig.parse(loaded.model_dump() | {"name": name}, origin="--name")
    if ranks is not None:
        table = loaded.model_dump()
        table["trainer"] |= {"ranks": ranks}
        loaded = RunConfig.parse(table, origin="--ranks")
    plan = preflight.check(loaded, own_engine=_own_engine())
    check_external_ledger()
    with Stack.up(state, environ=os.environ) as stack, ledger_of(stack) as ledger:
        loaded = _create(ledger, loaded, fresh_name=fresh_name)
        batches = "" if plan.batches is None else f" in {plan.batches} batches"
        _say_start(stack, loaded, f"{plan.tasks} tasks{batches}", state, json=json)
        code = attend.attend(ledger, loaded, stack.services, state, json=json)
    raise typer.Exit(code)


def resume(
    name: Name,
    from_step: Annotated[
        int | None,
        typer.Option(help="Close the run, and go on from this durable step as a new one."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Close the run, and go on as a new one with so many trainer processes, from its "
            "last step if that is durable, or from --from-step.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take the run from a trainer that still holds it.")
    ] = False,
    state: State = STATE,
    json: Events = False,
) -> None:
    """Go on with a run that crashed, failed or was closed, exactly where its ledger stands.

    Example: `rollbook resume reverse3`
    """
    check_external_ledger()
    with Stack.up(state, environ=os.environ) as stack, ledger_of(stack) as ledger:
        found = ledger.call(ledger_runs.read, name)
        datasets.refuse_own_loop(found.config)
        preflight.check(found.config, own_engine=_own_engine())
        if not force:
            _refuse_held(ledger, found)
        what = f"goes on at step {found.next_step}"
        before = found.shares
        shares = _shares(found.config, ranks)
        if from_step is not None or shares != before:
            found = _fork(ledger, name, from_step, shares, force=force)
            what = f"goes on from step {found.first_step} of {name}, which is closed"
            if found.shares != before:
                what += f"; {other_bits(before, found.shares, found.first_step)}"
        elif found.state == "finished":
            if json:
                print_event("end", run=name, state=found.state, step=found.next_step, failure=None)
            else:
                say(f"run {name} is finished at step {found.next_step}; nothing to do")
            return
        _say_start(stack, found.config, what, state, json=json)
        code = attend.attend(ledger, found.config, stack.services, state, force=force, json=json)
    raise typer.Exit(code)


def create(
    config: Config,
    exists_ok: Annotated[
        bool,
        typer.Option("--exists-ok", help="Succeed if the run exists with the same configuration."),
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Register a run in the ledger without training it (a cluster starts the processes itself).

    Example: `rollbook create runs/math.toml`
    """
    loaded = RunConfig.load(config)
    preflight.check(loaded)
    with open_ledger(state) as ledger:
        try:
            ledger.call(ledger_runs.create, loaded, world={})
        except RunExists:
            if not exists_ok or ledger.call(ledger_runs.read, loaded.name).config != loaded:
                raise
    if json:
        print_json({"run": loaded.name})
    else:
        say(
            f"run {loaded.name} is registered; `{command('resume', loaded.name, state=state)}` "
            "trains it here, `rollbook trainer` and `rollbook worker` on a cluster"
        )


def pause(name: Name, state: State = STATE, json: Json = False) -> None:
    """Stop handing over and planning; what is being sampled goes on and waits.

    Example: `rollbook pause reverse3`
    """
    with open_ledger(state) as ledger:
        ledger.call(ledger_runs.pause, name)
    if json:
        print_json({"run": name, "state": "paused"})
    else:
        say(f"run {name} is paused; `{command('unpause', name, state=state)}` goes on")


def unpause(name: Name, state: State = STATE, json: Json = False) -> None:
    """Go on with a paused run.

    Example: `rollbook unpause reverse3`
    """
    with open_ledger(state) as ledger:
        ledger.call(ledger_runs.unpause, name)
    if json:
        print_json({"run": name, "state": "running"})
    else:
        say(f"run {name} goes on")


def _own_engine() -> bool:
    """Whether the run starts an engine of its own, because the environment names none."""
    return not os.environ.get(VARIABLES["engines"])


def _create(ledger: Ledger, config: RunConfig, *, fresh_name: bool) -> RunConfig:
    """Register the run, numbering its name where that is wanted and needed."""
    number = 1
    original = config.name
    while True:
        try:
            ledger.call(ledger_runs.create, config, world={})
        except RunExists:
            if not fresh_name:
                raise
            number += 1
            config = RunConfig.parse(config.model_dump() | {"name": f"{original}-{number}"})
        else:
            return config


def _refuse_held(ledger: Ledger, run: Run) -> None:
    """A trainer that lives keeps its run; one of this host that is gone does not.

    Raises:
        RunHeld: names the holder.
    """
    holder, left = ledger.call(reports.trainer, run.id).values()
    here = holders.here().rpartition(":")[0]
    if not left or holder is None or holder.rpartition(":")[0] != here:
        return  # the trainer waits for a lease of elsewhere to run out
    if not holders.is_gone(holder):
        raise RunHeld(
            f"run {run.id} is being trained by {holder}; look with `rollbook status {run.id}`, "
            "stop that trainer, or take the run over with --force"
        )


def _shares(config: RunConfig, ranks: int | None) -> int:
    """Shares of the data that so many ranks read; default: those there are."""
    readers = config.trainer.readers
    if ranks is None:
        return config.trainer.shares
    if ranks % readers:
        raise ConfigError(
            f"--ranks {ranks} is no multiple of trainer.readers = {readers}: each share of the data "
            "has as many readers"
        )
    return ranks // readers


def _fork(ledger: Ledger, name: str, step: int | None, shares: int, *, force: bool) -> Run:
    """Close the run and create its child at a durable step, all or nothing."""

    def rewind(tx: Tx) -> Run:
        present = ledger_runs.holder(tx, name)
        free = force or (present is not None and holders.is_gone(present))
        epoch = ledger_runs.take_over(tx, name, holders.here(), lease_s=_FORK_S, force=free)
        return ledger_runs.read(tx, fork.fork(tx, name, epoch, step, shares=shares))

    return ledger.call(rewind)


def _say_start(stack: Stack, config: RunConfig, what: str, state: Path, *, json: bool) -> None:
    """Where everything is, before the first step."""
    logs = state.resolve() / "runs" / config.name / "logs"
    risks = acknowledged(config)
    if json:
        print_event("start", run=config.name, logs=str(logs), services=facts(stack), risks=risks)
        return
    show_stack(stack, json=False)
    say(f"run {config.name}: {what}; logs in {logs}")
    for risk in risks:
        say(f"  {risk}", style="yellow")
