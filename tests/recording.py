"""Keeps the history of a workflow for the replay tests, when asked to (`RECORD_HISTORIES=1`)."""

import os
import re
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle

HISTORIES = Path(__file__).parent / "histories"

LIMIT = 64 * 1024
"""Bytes of history that any path of a workflow may take."""

_MACHINE = re.compile(r'"(stackTrace|identity)": "(?:[^"\\]|\\.)*"')
"""What tells of the machine that recorded, and nothing to a replay."""


async def keep(handle: WorkflowHandle[Any, Any], name: str) -> None:
    """Check the history's size, and write it to tests/histories."""
    history = await handle.fetch_history()
    assert sum(event.ByteSize() for event in history.events) < LIMIT
    if os.environ.get("RECORD_HISTORIES"):
        text = _MACHINE.sub(r'"\1": ""', history.to_json())
        (HISTORIES / f"{name}.json").write_text(text + "\n", encoding="utf-8")
