"""Which services a command talks to: the environment's, or those of the local stack in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError

from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook.stack.stack import Stack
from rollbook.stack.state import StateFolder
from storage.database import Ledger, check_schema

_NOWHERE = "nowhere"
# Stands for what the environment does not name, where the ledger is enough.
_ELSEWHERE = {
    VARIABLES["temporal_address"]: _NOWHERE,
    VARIABLES["s3_endpoint"]: _NOWHERE,
    VARIABLES["s3_access_key"]: "-",
    VARIABLES["s3_secret_key"]: "-",
}

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


@dataclass(frozen=True)
class Looking:
    """What commands look at: the ledger, and Temporal if it answers."""

    ledger: Ledger
    services: Services

    @property
    def has_store(self) -> bool:
        """Whether the object store's address is known."""
        return self.services.s3_endpoint != _NOWHERE

    async def temporal(self) -> Client | None:
        """A client of the calling event loop; None if nothing answers."""
        if self.services.temporal_address == _NOWHERE:
            return None
        try:
            return await Client.connect(
                self.services.temporal_address,
                namespace=self.services.temporal_namespace,
                data_converter=pydantic_data_converter,
            )
        except (RPCError, RuntimeError):  # RuntimeError: nothing listens there
            return None


@contextmanager
def open_looking(state: Path) -> Iterator[Looking]:
    """As `open_ledger`, with Temporal: that of the environment or of the stack.

    Raises:
        ConfigError: there is no ledger to read.
    """
    if url := os.environ.get(VARIABLES["database_url"]):
        services = Services.from_environment(_ELSEWHERE | os.environ)
        with _ledger(url) as ledger:
            yield Looking(ledger, services)
        return
    with _local_stack(state) as stack, _ledger(stack.services.database_url) as ledger:
        yield Looking(ledger, stack.services)


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
    with _local_stack(state) as stack, _ledger(stack.services.database_url) as ledger:
        yield ledger


def _local_stack(state: Path) -> Stack:
    if not (state / "lock").exists():
        raise ConfigError(
            f"no local stack in {state}; pass --state, or set {VARIABLES['database_url']}"
        )
    return Stack.up(state, environ=os.environ)


@contextmanager
def _ledger(url: str) -> Iterator[Ledger]:
    check_schema(url)
    ledger = Ledger.open(url, pool=2, application="rollbook-cli")
    try:
        yield ledger
    finally:
        ledger.close()
