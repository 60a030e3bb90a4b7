"""Which services a command talks to: the environment's, or those of the local stack in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from domain.config import VARIABLES, Services
from domain.errors import ConfigError
from rollbook.stack.stack import Stack
from rollbook.stack.state import StateFolder
from storage.database import Ledger, check_schema

STATE = Path(".rollbook")
"""Default folder of the local stack."""


def services_for(state: Path) -> Services:
    """The services of the environment, or of the stack that is up in the folder.

    Raises:
        ConfigError: neither is there.
    """
    required = [VARIABLES[n] for n, f in Services.model_fields.items() if f.is_required()]
    if all(os.environ.get(name) for name in required):
        return Services.from_environment(os.environ)
    if (state / "lock").exists() and (found := StateFolder(state).published()) is not None:
        return found.services
    raise ConfigError(
        f"no stack is up in {state} and the environment does not name one; start it with "
        f"`rollbook up --state {state}`, or set {', '.join(required)}"
    )


@contextmanager
def open_ledger(state: Path) -> Iterator[Ledger]:
    """The ledger, for reading. A stack that is down is started for as long as that takes.

    Raises:
        ConfigError: there is no ledger to read.
    """
    if url := os.environ.get(VARIABLES["database_url"]):
        with _ledger(url) as ledger:
            yield ledger
        return
    if not (state / "lock").exists():
        raise ConfigError(
            f"no local stack in {state}; pass --state, or set {VARIABLES['database_url']}"
        )
    with (
        Stack.up(state, environ=os.environ) as stack,
        _ledger(stack.services.database_url) as ledger,
    ):
        yield ledger


@contextmanager
def _ledger(url: str) -> Iterator[Ledger]:
    check_schema(url)
    ledger = Ledger.open(url, pool=2, application="rollbook-cli")
    try:
        yield ledger
    finally:
        ledger.close()
