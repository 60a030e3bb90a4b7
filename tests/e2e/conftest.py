"""The `rollbook` command in a folder of its own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.services import VARIABLES
from rollbook.root import ROOT
from rollbook.stack import stack
from tests.command_line import Rollbook


@pytest.fixture
def rollbook(tmp_path: Path) -> Iterator[Rollbook]:
    """The command line in a folder of its own."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o711)  # PostgreSQL, as nobody, must pass through
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
    environ.pop("COLUMNS", None)
    command = Rollbook(tmp_path, tmp_path / "state", environ)
    yield command
    for process in command.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
    stack.down(command.state)
