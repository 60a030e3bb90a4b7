"""Which services a command talks to: the environment's, or those of the local stack in a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from temporalio.client import Client
from temporalio.service import RPCError

from domain.errors import ConfigError
from domain.services import VARIABLES, Services
from rollbook import temporal
from rollbook.stack import stack as stacks
from rollbook.stack.stack import Stack
from rollbook.stack.state import StateFolder
from storage.connections import Silence
from storage.database import Ledger, check_schema, upgrade

_NOWHERE = "nowhere"
# Stands for what the environment does not name, where the ledger is enough.
_ELSEWHERE = {
    VARIABLES["temporal_address"]: _NOWHERE,
    VARIABLES["s3_endpoint"]: _NOWHERE,
}

STATE = Path(".rollbook")
"""Default folder of the local stack."""

_URL = VARIABLES["database_url"]


def services_for(state: Path) -> Services:
    """The services of the environment, or of the stack that is up in the folder.

    Raises:
        ConfigError: neither is there.
    """
    required = [VARIABLES[n] for n, f in Services.model_fields.items() if f.is_required()]
    if all(os.environ.get(name) for name in required):
        return Services.from_environment(os.environ)
    if _exists(state) and (found := StateFolder(state).published()) is not None:
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
            return await temporal.connect(self.services)
        except (RPCError, RuntimeError):  # RuntimeError: nothing listens there
            return None


@contextmanager
def open_looking(state: Path, *, store: bool = False) -> Iterator[Looking]:
    """As `open_ledger`, with Temporal: that of the environment or of the stack that is up.

    Args:
        state: folder of the local stack.
        store: the object store is needed too, so a local stack that is down is started whole.

    Raises:
        ConfigError: there is no ledger to read.
    """
    found = StateFolder(state).published() if _exists(state) else None
    if store and found is None and _exists(state) and not os.environ.get(_URL):
        with Stack.up(state, environ=os.environ) as stack, ledger_of(stack) as ledger:
            yield Looking(ledger, stack.services)
        return
    with database_url(state) as url:
        known = {} if found is None else found.services.environment()
        services = Services.from_environment({**_ELSEWHERE, **os.environ, **known, _URL: url})
        ledger = ledger_at(url, own=False)
        try:
            yield Looking(ledger, services)
        finally:
            ledger.close()


@contextmanager
def open_ledger(state: Path) -> Iterator[Ledger]:
    """The ledger alone. Where the local stack is down, its Postgres is started for the block.

    Raises:
        ConfigError: there is no ledger to read, or it cannot be reached.
        SchemaMismatch: it belongs to another version of this code.
    """
    with database_url(state) as url:
        ledger = ledger_at(url, own=False)
        try:
            yield ledger
        finally:
            ledger.close()


@contextmanager
def database_url(state: Path) -> Iterator[str]:
    """Where the ledger is, reachable within the block.

    Raises:
        ConfigError: neither the environment nor the folder has one.
    """
    if url := os.environ.get(_URL):
        yield url
        return
    if not _exists(state):
        raise ConfigError(f"no local stack in {state}; pass --state, or set {_URL}")
    with stacks.database(state, environ=os.environ) as url:
        yield url


def is_up(state: Path) -> bool:
    """Whether the ledger can be read without starting anything."""
    if os.environ.get(_URL):
        return True
    return _exists(state) and StateFolder(state).published() is not None


@contextmanager
def ledger_of(stack: Stack) -> Iterator[Ledger]:
    """The ledger of a stack that is up; one of its own is brought up to date.

    Raises:
        ConfigError: it cannot be reached.
        SchemaMismatch: it belongs to another version of this code.
    """
    own = "postgres" in stack.embedded
    ledger = ledger_at(stack.services.database_url, own=own, pool=4, patience_s=60)
    try:
        yield ledger
    finally:
        ledger.close()


def check_external_ledger() -> None:
    """Check the ledger that the environment names, if it names one, before anything is started.

    Raises:
        ConfigError: it cannot be reached.
        SchemaMismatch: it belongs to another version of this code.
    """
    if url := os.environ.get(_URL):
        ledger_at(url, own=False).close()


def ledger_at(url: str, *, own: bool, pool: int = 2, patience_s: float = 0) -> Ledger:
    """Connect; a ledger of one's own is brought up to date, another one must fit.

    Args:
        url: address.
        own: it belongs to the local stack.
        pool: connections at most.
        patience_s: as for `Ledger.open`.

    Raises:
        ConfigError: it cannot be reached.
        SchemaMismatch: it belongs to another version of this code.
    """
    try:
        if own:
            upgrade(url)
        else:
            check_schema(url)
        return Ledger.open(url, pool=pool, application="rollbook-cli", patience_s=patience_s)
    except (psycopg.errors.ConnectionTimeout, Silence) as error:
        raise ConfigError(
            f"{_URL}: no connection to the ledger: {str(error).strip()}; the server is frozen or "
            "overloaded, or what lies between drops packets"
        ) from error
    except psycopg.Error as error:
        raise ConfigError(
            f"{_URL}: no connection to the ledger: {str(error).strip()}; check the address and the "
            "password"
        ) from error


def _exists(state: Path) -> bool:
    return (state / "lock").exists()
