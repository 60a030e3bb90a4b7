"""One local stack: what is not configured as an external address is started from pip wheels.

`Stack.up` checks the external services, takes the state folder, starts the rest in parallel and
returns when each has answered a real operation. If another process holds the folder it joins that
stack instead. The services die with the process that started them, however it ends.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from domain.errors import ConfigError, RollbookError
from domain.services import Services
from rollbook.stack import external, parts, ports, processes
from rollbook.stack.child import ChildFailed, Report
from rollbook.stack.parts import Parts, PortWishes
from rollbook.stack.state import Published, StateFolder
from rollbook.stack.supervise import Supervisor

log = logging.getLogger(__name__)

_PORT_TRIES = 4


@dataclass(slots=True)
class Stack:
    """A stack that is up. A context manager: leaving it stops what this process started."""

    services: Services
    """Where everything is, embedded or external."""
    folder: StateFolder
    embedded: tuple[str, ...]
    """The parts that run from wheels: `postgres`, `temporal`, `s3`."""
    joined: processes.Mark | None = None
    """The process that runs the embedded parts, if it is not this one."""
    notes: tuple[str, ...] = ()
    """What a person should know: ports that had to differ from the usual ones."""
    supervisor: Supervisor | None = field(default=None, repr=False)
    """Of this process's own children; None if it joined, or started nothing."""

    @classmethod
    def up(
        cls,
        state: Path,
        *,
        environ: Mapping[str, str],
        wishes: PortWishes | None = None,
        on_change: Callable[[Report], None] | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Start the stack, or join the one that runs in this folder.

        Args:
            state: the folder of data, secrets and logs.
            environ: an address in it (ROLLBOOK_DATABASE_URL, ROLLBOOK_TEMPORAL_ADDRESS,
                ROLLBOOK_S3_ENDPOINT) takes the place of that embedded part.
            wishes: ports asked for by name.
            on_change: told each new state of each child.
            timeout_s: longest start.

        Raises:
            ConfigError: an external service cannot be used, a port asked for is taken, a wheel is
                missing, or the folder belongs to a stack that does not fit.
            ChildFailed: a service did not start; the end of its log is in the text.
        """
        embedded = parts.embedded_in(environ)
        others = [part for part in parts.PARTS if part not in embedded]
        if others:
            later = dict.fromkeys(parts.variables_of(embedded), "")
            later |= {parts.ADDRESSES[part]: "embedded" for part in embedded}
            external.check(Services.from_environment({**environ, **later}), others)
        if not (state / "lock").exists():  # nothing is made for a port that cannot be had
            for name, port in (wishes or PortWishes()).asked().items():
                ports.demand(port, parts.option(name))
        folder = StateFolder(state)
        try:
            if not embedded:
                return cls(Services.from_environment(environ), folder, ())
            end = time.monotonic() + timeout_s
            while not folder.hold():
                if (found := folder.published()) is not None:
                    return cls._join(folder, found, environ, embedded, wishes or PortWishes())
                if time.monotonic() > end:
                    raise _stalled(folder, timeout_s)
                time.sleep(0.05)
            return cls._start(
                folder, embedded, environ, wishes or PortWishes(), on_change, timeout_s
            )
        except BaseException:
            folder.release()
            raise

    def down(self) -> None:
        """Stop what this process started; a joined stack goes on for its owner. Idempotent."""
        if self.supervisor is not None:
            self.folder.withdraw()
            self.supervisor.close()
            self.supervisor = None
        self.folder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @classmethod
    def _start(
        cls,
        folder: StateFolder,
        embedded: tuple[str, ...],
        environ: Mapping[str, str],
        wishes: PortWishes,
        on_change: Callable[[Report], None] | None,
        timeout_s: float,
    ) -> Self:
        servers, supervisor = _start_parts(
            folder, embedded, environ, wishes, on_change=on_change, timeout_s=timeout_s
        )
        services = Services.from_environment({**environ, **servers.addresses(embedded)})
        folder.publish(embedded, services)
        notes = parts.moved(servers.ports, wishes)
        return cls(services, folder, embedded, notes=notes, supervisor=supervisor)

    @classmethod
    def _join(
        cls,
        folder: StateFolder,
        found: Published,
        environ: Mapping[str, str],
        embedded: tuple[str, ...],
        wishes: PortWishes,
    ) -> Self:
        if found.embedded != embedded:
            raise ConfigError(
                f"process {found.owner.pid} runs {', '.join(found.embedded)} in {folder.path}, this "
                f"one would need {', '.join(embedded)}; set the same addresses "
                f"({', '.join(parts.ADDRESSES.values())}), or choose another --state"
            )
        running = parts.ports_of(found.services)
        for name, port in wishes.asked().items():
            if name in running and running[name] != port:
                raise ConfigError(
                    f"{parts.option(name)} = {port}, but the stack in {folder.path} (process "
                    f"{found.owner.pid}) listens on {running[name]}; leave the option out, or stop "
                    "that stack first (`rollbook down`)"
                )
        addresses = found.services.environment()
        told = {v: addresses[v] for v in parts.variables_of(embedded) if v in addresses}
        services = Services.from_environment({**environ, **told})
        external.check(services, embedded)
        return cls(services, folder, embedded, joined=found.owner)


def _start_parts(
    folder: StateFolder,
    embedded: tuple[str, ...],
    environ: Mapping[str, str],
    wishes: PortWishes,
    *,
    on_change: Callable[[Report], None] | None = None,
    timeout_s: float,
) -> tuple[Parts, Supervisor]:
    """Start the servers in a folder that this process holds, and wait until all answer."""
    folder.withdraw()
    if left := processes.reap_leftovers(folder.pids):
        log.warning("ended what an earlier supervisor left behind: %s", ", ".join(left))
    record = folder.record()
    tries = 0
    while True:
        tries += 1
        chosen = parts.choose_ports(embedded, wishes, record)
        servers = Parts(folder.path, record, chosen, environ)
        supervisor = Supervisor(folder.pids, on_change=on_change)
        try:
            servers.start(supervisor, embedded)
            supervisor.wait_ready(timeout_s=timeout_s)
            break
        except BaseException as error:
            supervisor.close()
            # Somebody may have taken a port between our look and the server's.
            raced = isinstance(error, ChildFailed) and not all(map(ports.is_free, chosen.values()))
            if not raced or tries == _PORT_TRIES:
                raise
    folder.remember_ports(record, chosen)
    return servers, supervisor


@contextmanager
def database(state: Path, *, environ: Mapping[str, str], timeout_s: float = 60.0) -> Iterator[str]:
    """The folder's Postgres: that of the stack that is up, else started alone for the block.

    It is not published: who wants the whole stack meanwhile waits for the block to end.

    Args:
        state: the folder; it should exist.
        environ: as for `Stack.up`.
        timeout_s: longest start.

    Yields:
        its address.

    Raises:
        ConfigError: somebody holds the folder and does not come up.
        ChildFailed: it did not start; the end of its log is in the text.
    """
    folder = StateFolder(state)
    try:
        end = time.monotonic() + timeout_s
        while not folder.hold():
            if (found := folder.published()) is not None:
                yield found.services.database_url
                return
            if time.monotonic() > end:
                raise _stalled(folder, timeout_s)
            time.sleep(0.05)
        servers, supervisor = _start_parts(
            folder, ("postgres",), environ, PortWishes(), timeout_s=timeout_s
        )
        with supervisor:
            yield servers.postgres().url()
    finally:
        folder.release()


def _stalled(folder: StateFolder, waited_s: float) -> ConfigError:
    return ConfigError(
        f"process {_name(folder.holder())} holds {folder.path}, but its services are not up after "
        f"{waited_s:g} s; stop it (`rollbook down`), or read {folder.logs}"
    )


def down(state: Path, *, timeout_s: float = 60.0) -> bool:
    """Stop the stack of a folder, whichever process runs it; whether there was one.

    Raises:
        RollbookError: its process does not end; names it.
    """
    if not (state / "lock").exists():
        return False
    folder = StateFolder(state)
    end = time.monotonic() + timeout_s
    told: processes.Mark | None = None
    while not folder.hold():
        holder = folder.holder()
        if holder is not None and holder != told:
            os.kill(holder.pid, signal.SIGTERM)
            told = holder
        if time.monotonic() > end:
            folder.release()
            raise RollbookError(
                f"process {_name(holder)} still holds {folder.path} {timeout_s:g} s after SIGTERM; "
                f"it may be saving its work. kill -9 {_name(holder)} ends it and its services"
            )
        time.sleep(0.05)
    if told is not None:
        told.wait_gone(end - time.monotonic())
    left = processes.reap_leftovers(folder.pids)
    folder.withdraw()
    folder.release()
    return told is not None or bool(left)


def _name(mark: processes.Mark | None) -> str:
    return str(mark.pid) if mark else "(unknown)"
