"""What commands print: tables for people, one JSON document for programs."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console()
errors = Console(stderr=True)


def show(value: Any) -> str:
    """A cell for people."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%H:%M:%S")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.hex() if len(data) <= 32 else f"{data[:8].hex()}… ({len(data)} bytes)"
    if isinstance(value, Mapping | list):
        return json.dumps(value, default=plain)
    return str(value)


def plain(value: Any) -> Any:
    """What json cannot write by itself: times as ISO text, bytes as hex, the rest as text."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return str(value)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(document, default=plain, indent=2))


def print_table(rows: Sequence[Mapping[str, Any]], *, title: str, empty: str) -> None:
    """Rows with a common set of columns; `empty` is said when there are none."""
    if not rows:
        console.print(f"{title}: {empty}", highlight=False)
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(show(value) for value in row.values()))
    console.print(table)


def print_facts(facts: Mapping[str, Any], *, title: str) -> None:
    """One thing and its properties, a line each."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, show(value))
    console.print(table)
