"""The `rollbook` command in a folder of its own."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.services import VARIABLES
from rollbook.root import ROOT
from rollbook.stack import stack
from tests.command_line import Rollbook


@pytest.fixture
def rollbook() -> Iterator[Rollbook]:
    """The command line in a folder of its own, which PostgreSQL can enter as `nobody`.

    Not below pytest's own: other sessions close that to all but its owner.
    """
    folder = Path(tempfile.mkdtemp(prefix="rollbook-e2e-"))
    folder.chmod(0o711)
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES.values()}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = Rollbook(folder, folder / "state", environ)
    yield command
    for process in command.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    stack.down(command.state)
    shutil.rmtree(folder)
