"""`up` and `down`: the local stack."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.commands.signals import stop_signal
from rollbook.connect import STATE
from rollbook.output import command, console, print_facts, print_json, say
from rollbook.stack import background
from rollbook.stack import stack as stacks
from rollbook.stack.parts import PortWishes
from rollbook.stack.stack import Stack
from storage.database import upgrade

State = Annotated[Path, typer.Option(help="Folder of its data, secrets and logs.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(up)
    app.command()(down)


def up(
    state: State = STATE,
    postgres_port: Annotated[int | None, typer.Option(help="Default: 5432 or a free one.")] = None,
    temporal_port: Annotated[int | None, typer.Option(help="Default: 7233 or a free one.")] = None,
    temporal_ui_port: Annotated[
        int | None, typer.Option(help="Default: 8233 or a free one.")
    ] = None,
    s3_port: Annotated[int | None, typer.Option(help="Default: 8333 or a free one.")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running.")] = False,
    json: Json = False,
) -> None:
    """Start Postgres, Temporal and S3 from wheels, and keep them running until Ctrl-C.

    With `--detach` a process of its own keeps them running until `rollbook down`.

    A second `up` on the same folder reports the stack that runs there.

    Example: `rollbook up --state /data/rollbook`
    """
    wishes = PortWishes(
        postgres=postgres_port, temporal=temporal_port, temporal_ui=temporal_ui_port, s3=s3_port
    )
    if detach:
        with background.start(state, environ=os.environ, wishes=wishes) as stack:
            _migrate(stack)
            show_stack(stack, json=json)
        return
    stopping = stop_signal()
    with Stack.up(state, environ=os.environ, wishes=wishes) as stack:
        _migrate(stack)
        show_stack(stack, json=json)
        if stack.supervisor is not None:
            if not json:
                say("Ctrl-C stops it; nothing is lost")
            stopping.wait()


def down(state: State = STATE, json: Json = False) -> None:
    """Stop the stack of a folder, whoever runs it. Nothing is lost.

    Example: `rollbook down`
    """
    stopped = stacks.down(state)
    if json:
        print_json({"stopped": stopped})
    else:
        say("stopped" if stopped else f"no stack is up in {state}")


def _migrate(stack: Stack) -> None:
    """Bring a ledger of one's own up to date; that of others is left to `rollbook db upgrade`."""
    if "postgres" in stack.embedded:
        upgrade(stack.services.database_url)


def facts(stack: Stack) -> dict[str, Any]:
    """Where the services listen; secrets stay in the state folder."""
    s = stack.services
    mine = "this process" if stack.supervisor is not None else "others (see the environment)"
    return {
        "temporal": s.temporal_address,
        "temporal_ui": s.temporal_ui,
        "postgres": s.database_url.rpartition("@")[2],
        "s3": s.s3_endpoint,
        "state": str(stack.folder.path),
        "run_by": mine if stack.joined is None else f"process {stack.joined.pid}",
    }


def show_stack(stack: Stack, *, json: bool) -> None:
    """Where the services listen, and what a person should know about them."""
    if json:
        print_json(facts(stack))
        return
    told = {name.replace("_", " "): value for name, value in facts(stack).items() if value}
    print_facts(told, title="local stack")
    for note in stack.notes:
        console.print(f"note: {note}", style="yellow", highlight=False)
    if stack.joined is not None:
        console.print(
            f"note: process {stack.joined.pid} runs this stack; it ends when that process does, or "
            f"with `{command('down', state=stack.folder.path)}`",
            style="yellow",
            highlight=False,
        )
