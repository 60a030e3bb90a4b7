"""`run`, `resume`, `create`, `close`, `pause` and `unpause`: the life of a run."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from domain import sources
from domain.config import RunConfig
from domain.environments import samples_at_gateway
from domain.errors import ConfigError, RunExists
from domain.risks import acknowledged
from domain.services import VARIABLES, Services
from rollbook import preflight
from rollbook.commands.stack import show_stack
from rollbook.connect import STATE, open_ledger, services_for
from rollbook.launch import Job
from rollbook.output import console, print_json, print_table
from rollbook.progress import Progress
from rollbook.stack.stack import Stack
from rollbook.stack.supervise import State as ProcessState
from storage import datasets
from storage import runs as ledger_runs
from storage.database import Ledger, check_schema, upgrade

State = Annotated[Path, typer.Option(help="Folder of the local stack, its data and logs.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON: a document per step and one at the end.")
]
Config = Annotated[Path, typer.Argument(help="Run configuration (TOML).")]
Name = Annotated[str, typer.Argument(help="Name of the run.")]

_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command in (run, resume, create, pause, unpause):
        app.command()(command)


def run(
    config: Config,
    name: Annotated[str | None, typer.Option(help="Instead of the name in the file.")] = None,
    fresh_name: Annotated[
        bool,
        typer.Option(help="Number the name if a run of that name exists (reverse3, reverse3-2)."),
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Create a run and train it to its end, with everything it needs.

    Starts the local stack unless the environment names services, the engine, the workers and the
    trainer; shows progress; stops what it started. Ctrl-C checkpoints and closes the run; `rollbook
    resume NAME` goes on.

    Example: `rollbook run examples/reverse3.toml`
    """
    loaded = RunConfig.load(config)
    if name is not None:
        loaded = RunConfig.parse(loaded.model_dump() | {"name": name}, origin="--name")
    plan = preflight.check(loaded, own_engine=_own_engine())
    with Stack.up(state, environ=os.environ) as stack:
        ledger = _ledger(stack)
        try:
            loaded = _create(ledger, loaded, fresh_name=fresh_name)
            if not json:
                show_stack(stack, json=False)
                batches = "" if plan.batches is None else f" in {plan.batches} batches"
                console.print(
                    f"run [bold]{loaded.name}[/bold]: {plan.tasks} tasks{batches}; logs in "
                    f"{state.resolve() / 'runs' / loaded.name / 'logs'}",
                    highlight=False,
                )
                for risk in acknowledged(loaded):
                    console.print(f"  {risk}", style="yellow", markup=False, highlight=False)
            return _train(ledger, loaded, stack.services, state, force=False, json=json)
        finally:
            ledger.close()


def resume(
    name: Name,
    from_step: Annotated[
        int | None, typer.Option(help="Fork a new run from this durable checkpoint.")
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Take the run from a trainer that still holds it.")
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> int:
    """Go on with a run that crashed, failed or was closed, exactly where its ledger stands.

    Example: `rollbook resume reverse3`
    """
    with Stack.up(state, environ=os.environ) as stack:
        ledger = _ledger(stack)
        try:
            found = ledger.call(ledger_runs.read, name)
            datasets.refuse_own_loop(found.config)
            if from_step is not None:
                from storage import fork

                child = ledger.call(fork.fork, name, from_step)
                console.print(f"forked run {child} from step {from_step} of {name}")
                found = ledger.call(ledger_runs.read, child)
            elif found.state == "finished":
                console.print(f"run {name} is finished at step {found.next_step}; nothing to do")
                return 0
            preflight.check(found.config, own_engine=_own_engine())
            if not json:
                show_stack(stack, json=False)
            return _train(ledger, found.config, stack.services, state, force=force, json=json)
        finally:
            ledger.close()


def create(
    config: Config,
    exists_ok: Annotated[
        bool, typer.Option(help="Succeed if the run exists with the same configuration.")
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Register a run in the ledger without training it (a cluster starts the processes itself).

    Example: `rollbook create runs/math.toml`
    """
    loaded = RunConfig.load(config)
    preflight.check(loaded)
    ledger = Ledger.open(services_for(state).database_url, pool=1, application="rollbook-cli")
    try:
        ledger.call(ledger_runs.create, loaded, world={})
    except RunExists:
        if not exists_ok or ledger.call(ledger_runs.read, loaded.name).config != loaded:
            raise
    finally:
        ledger.close()
    if json:
        print_json({"run": loaded.name})
    else:
        console.print(
            f"run {loaded.name} is registered; `rollbook trainer {loaded.name}` trains it"
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
        console.print(f"run {name} is paused; `rollbook unpause {name}` goes on")


def unpause(name: Name, state: State = STATE, json: Json = False) -> None:
    """Go on with a paused run.

    Example: `rollbook unpause reverse3`
    """
    with open_ledger(state) as ledger:
        ledger.call(ledger_runs.unpause, name)
    if json:
        print_json({"run": name, "state": "running"})
    else:
        console.print(f"run {name} goes on")


def _own_engine() -> bool:
    """Whether the run starts an engine of its own, because the environment names none."""
    return not os.environ.get(VARIABLES["engines"])


def _ledger(stack: Stack) -> Ledger:
    """The stack's ledger; an embedded one is brought up to date, an external one must fit."""
    url = stack.services.database_url
    if "postgres" in stack.embedded:
        upgrade(url)
    else:
        check_schema(url)
    return Ledger.open(url, pool=4, application="rollbook-cli", patience_s=60)


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


def _train(
    ledger: Ledger, config: RunConfig, services: Services, state: Path, *, force: bool, json: bool
) -> int:
    """Run the processes until the trainer's end; the exit code."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    gateway = samples_at_gateway(sources.load(config))
    with Job(config, services, state, force=force, gateway=gateway) as job:
        asked = False
        with Progress(config, ledger, console, json=json) as progress:
            while (ended := job.trainer_ended()) is None:
                progress.refresh(job.supervisor.reports())
                if stopping and not asked:
                    asked = True
                    job.stop_trainer()
                time.sleep(_POLL_S)
            progress.refresh(job.supervisor.reports())
        found = ledger.call(ledger_runs.read, config.name)
        if ended.state is ProcessState.FAILED and found.state == "running":
            raise ConfigError(f"the trainer of run {config.name} broke: {ended.detail}")
        if found.state == "finished" and config.evaluation is not None:
            from rollbook.evaluation import evaluate

            held_out = evaluate(ledger, job.services, config, found.version, cache=state / "cache")
            if not json:
                print_table(held_out, title="held-out evaluation", empty="no task")
    _say_end(ledger, config, json=json)
    return 1 if found.state == "failed" else 0


def _say_end(ledger: Ledger, config: RunConfig, *, json: bool) -> None:
    """How the run ended, and where to look."""
    found = ledger.call(ledger_runs.read, config.name)
    if json:
        print_json(
            {
                "run": found.id,
                "state": found.state,
                "step": found.next_step,
                "failure": found.failure,
            }
        )
        return
    name = found.id
    console.print(f"\nrun [bold]{name}[/bold] is {found.state} at step {found.next_step}")
    if found.failure:
        console.print(found.failure, style="red", markup=False, highlight=False)
    if found.state in ("failed", "closed"):
        console.print(f"  go on          rollbook resume {name}", highlight=False)
    console.print(f"  where it stands  rollbook status {name}", highlight=False)
    console.print('  ask in SQL       rollbook sql "SELECT * FROM reward_by_version"', markup=False)
    console.print("  Temporal UI      rollbook up   (prints its address)", highlight=False)
