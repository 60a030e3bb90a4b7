"""What commands print: tables for people, JSON for programs, and logs."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_UNBOUNDED = 200
console = Console(width=None if sys.stdout.isatty() else _UNBOUNDED)
errors = Console(stderr=True)


def show(value: Any) -> str:
    """A cell for people."""
    if value is None:
        return "–"
    if isinstance(value, float | Decimal):
        return _number(float(value))
    if isinstance(value, datetime):
        return value.astimezone().strftime("%H:%M:%S")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.hex() if len(data) <= 32 else f"{data[:8].hex()}… ({len(data)} bytes)"
    if isinstance(value, Mapping | list):
        return json.dumps(value, default=plain)
    return str(value)


def _number(value: float) -> str:
    if 0 < abs(value) < 0.0005:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"


def plain(value: Any) -> Any:
    """What json cannot write by itself: times as ISO text, bytes as hex, the rest as text."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return str(value)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, default=plain, indent=2), flush=True)


def print_event(event: str, **facts: Any) -> None:
    """One JSON document on a line of its own, for commands that tell what happens as it does."""
    print(json.dumps({"event": event} | facts, default=plain), flush=True)


def print_table(rows: Sequence[Mapping[str, Any]], *, title: str, empty: str) -> None:
    """Rows with a common set of columns; `empty` is said when there are none."""
    if not rows:
        console.print(f"{title}: {empty}", highlight=False)
        return
    console.print(table_of(rows, title=title))


def table_of(rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    """The rows, drawn; there is at least one. Columns without any value are left out."""
    table = Table(title=title, title_justify="left", header_style="bold")
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(show(row[name]) for name in columns))
    return table


def print_facts(facts: Mapping[str, Any], *, title: str) -> None:
    """One thing and its properties, a line each."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, show(value))
    console.print(table)


def say(text: str, *, style: str | None = None) -> None:
    """A line as it is: no markup, no colours guessed."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def command(*arguments: str, state: Path | None = None) -> str:
    """A `rollbook` command as this person can type it here.

    Args:
        arguments: what follows `rollbook`.
        state: named when it is not the default folder.
    """
    beside = Path(sys.executable).with_name("rollbook")
    found = shutil.which("rollbook")
    if found is not None and Path(found).resolve() == beside.resolve():
        words = ["rollbook"]
    elif beside.exists():
        words = [_near(beside)]
    else:
        words = [_near(Path(sys.executable)), "-m", "rollbook"]
    given = () if state is None or state == Path(".rollbook") else ("--state", str(state))
    return " ".join([*words, *arguments, *given])


def _near(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def log_to_stderr(level: int, *, json: bool = False, rank: str | None = None) -> None:
    """Have this process log lines for people, or JSON lines; ROLLBOOK_LOG overrides the level.

    Args:
        level: of what is logged.
        json: JSON lines.
        rank: which of several trainer processes this is, for they share a log; each line says it.
    """
    handler = logging.StreamHandler()
    who = "" if rank is None else f"rank {rank} "
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {who}%(name)s: %(message)s")
    handler.setFormatter(_JsonLines(rank) if json else text)
    named = logging.getLevelNamesMapping().get(os.environ.get("ROLLBOOK_LOG", "").upper())
    logging.basicConfig(level=named or level, handlers=[handler], force=True)
    for chatty in ("httpx", "alembic"):
        logging.getLogger(chatty).setLevel(max(named or level, logging.WARNING))


class _JsonLines(logging.Formatter):
    def __init__(self, rank: str | None) -> None:
        super().__init__()
        self._rank = {} if rank is None else {"rank": rank}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "at": at.isoformat(),
            "level": record.levelname,
            **self._rank,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
