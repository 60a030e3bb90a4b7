"""The `rollbook` command line: commands by subject, one place for errors and exit codes.

Exit codes: 0 done; 1 a run failed, or a fault of rollbook or its services; 2 refused input;
130 and 143 interrupted before there was anything to save.
"""

import logging
import signal
from collections.abc import Sequence
from types import FrameType

import psycopg
import typer

from domain.errors import ConfigError, LedgerError, ObjectError, RollbookError
from rollbook.commands import (
    audit,
    database,
    decode,
    evaluation,
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
from rollbook.output import errors, log_to_stderr

app = typer.Typer(
    name="rollbook",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Asynchronous RL post-training with durable rollout state.",
)
runs.register(app)
evaluation.register(app)
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
    log_to_stderr(logging.WARNING)
    # Both leave through the context managers: what was started is stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        app(list(arguments), prog_name="rollbook")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except (ConfigError, LedgerError, ObjectError) as refused:
        _complain(str(refused))
        return 2
    except (RollbookError, psycopg.OperationalError) as failed:
        _complain(str(failed))
        return 1
    return 0


def _complain(text: str) -> None:
    errors.print(
        f"rollbook: {text.strip()}", style="red", highlight=False, markup=False, soft_wrap=True
    )


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
