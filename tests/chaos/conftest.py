"""A local stack of its own for the tests that kill its parts; started once, by the first of them."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.services import Services
from rollbook.stack.stack import Stack
from tests.chaos.stage import Stage


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    folder = Path(tempfile.mkdtemp(prefix="rollbook-chaos-"))
    folder.chmod(0o711)
    with Stack.up(folder, environ={}) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def stack_services(stack: Stack) -> Services:
    """Of the stack, every part of which answers (an earlier test may have killed it)."""
    assert stack.supervisor is not None
    stack.supervisor.wait_ready()
    return stack.services


@pytest.fixture
def stage(stack_services: Services, tmp_path: Path) -> Iterator[Stage]:
    """The default run, nothing started."""
    with Stage.of(stack_services, tmp_path) as prepared:
        yield prepared
