"""The `rollbook` command line: commands by subject, one place for errors and exit codes.

Exit codes: 0 done, 1 a run failed or a fault of rollbook itself, 2 refused input.
"""

import logging
import os
from collections.abc import Sequence

import click
import typer

from domain.errors import ConfigError, LedgerError, ObjectError, RollbookError
from rollbook.commands import (
    audit,
    database,
    decode,
    look,
    model,
    processes,
    quarantine,
    report,
    runs,
    sinks,
    stack,
    stuck,
)
from rollbook.output import errors

app = typer.Typer(
    name="rollbook",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training with durable rollout state.",
)
runs.register(app)
look.register(app)
decode.register(app)
quarantine.register(app)
stuck.register(app)
report.register(app)
sinks.register(app)
stack.register(app)
processes.register(app)
model.register(app)
audit.register(app)
app.add_typer(database.app, name="db")


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    logging.basicConfig(
        level=os.environ.get("ROLLBOOK_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        result = app(list(arguments), standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as refused:
        refused.show()
        return 2
    except click.Abort:
        errors.print("interrupted", style="yellow")
        return 130
    except (ConfigError, LedgerError, ObjectError) as refused:
        errors.print(f"rollbook: {refused}", style="red", highlight=False, markup=False)
        return 2
    except RollbookError as failed:
        errors.print(f"rollbook: {failed}", style="red", highlight=False, markup=False)
        return 1
    return result if isinstance(result, int) else 0
