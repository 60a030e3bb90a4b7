"""The state folder of a local stack: its lock, its secrets, and who runs it now.

lock            held (flock) by the supervising process for as long as it lives; names it
stack.json      0600, made once: the services' secrets, and the ports used last
services.json   0600, while the stack is up: the addresses, for those who join
pids/ logs/     of the children
pg/ s3/ temporal.db   the data
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from domain.errors import ConfigError
from domain.services import Services
from rollbook.stack.processes import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a stack keeps between its lives."""

    postgres_password: str = field(repr=False)
    s3_access_key: str = field(repr=False)
    s3_secret_key: str = field(repr=False)
    ports: dict[str, int] = field(default_factory=dict)
    """Used last; tried first the next time."""

    @classmethod
    def fresh(cls) -> "Record":
        """New random secrets."""
        return cls(
            postgres_password=secrets.token_urlsafe(24),
            s3_access_key=secrets.token_hex(10).upper(),
            s3_secret_key=secrets.token_urlsafe(30),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A stack that is up."""

    owner: Mark
    embedded: tuple[str, ...]
    """The services it runs; the others are external."""
    services: Services


class StateFolder:
    """One folder; at most one process holds it."""

    def __init__(self, path: Path) -> None:
        """Make the folder where it is missing.

        Raises:
            ConfigError: it cannot be made or written.
        """
        self.path = path.resolve()
        try:
            # Root runs PostgreSQL as `nobody`, who must pass through; the files in it are closed.
            self.path.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)
            self.logs.mkdir(exist_ok=True, mode=0o700)
            self.pids.mkdir(exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the state folder {self.path} cannot be used by user id {os.geteuid()}: {error}; "
                "choose another --state, or start as the user that owns it"
            ) from error

    @property
    def logs(self) -> Path:
        """Logs of the children."""
        return self.path / "logs"

    @property
    def pids(self) -> Path:
        """Pidfiles of the children."""
        return self.path / "pids"

    def hold(self) -> bool:
        """Take the folder for this process's life, if nobody has it; whether it did."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        mark = Mark.of(os.getpid())
        assert mark is not None
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"{mark.pid} {mark.birth}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Give the folder up; the object is not used afterwards. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def holder(self) -> Mark | None:
        """The process that holds the folder, as far as it has said so."""
        mark = Mark.read(self.path / "lock")
        return mark if mark is not None and mark.alive() else None

    def record(self) -> Record:
        """The secrets and ports, made at the first call.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self.path / "stack.json"
        if not path.exists():
            if (self.path / "pg").exists() or (self.path / "s3").exists():
                raise ConfigError(
                    f"{path} is missing, but {self.path} holds data: without its secrets nobody "
                    "can log in; restore the file, or choose another --state"
                )
            self._write(path, asdict(Record.fresh()))
        try:
            return Record(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}); restore it, or choose another --state"
            ) from error

    def remember_ports(self, record: Record, ports: Mapping[str, int]) -> None:
        """Note the ports in use, so that the next life of the stack tries them first."""
        known = record.ports | dict(ports)
        if known != record.ports:
            self._write(self.path / "stack.json", asdict(replace(record, ports=known)))

    def publish(self, embedded: tuple[str, ...], services: Services) -> None:
        """Tell others where the services are."""
        mark = Mark.of(os.getpid())
        assert mark is not None
        told = {"owner": asdict(mark), "embedded": embedded, "services": services.model_dump()}
        self._write(self.path / "services.json", told)

    def published(self) -> Published | None:
        """The stack that is up, if its owner lives."""
        try:
            told = json.loads((self.path / "services.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        owner = Mark(**told["owner"])
        if not owner.alive():
            return None
        return Published(
            owner=owner,
            embedded=tuple(told["embedded"]),
            services=Services.model_validate(told["services"]),
        )

    def withdraw(self) -> None:
        """No longer up."""
        (self.path / "services.json").unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, value: Any) -> None:
        draft = path.with_name(path.name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            json.dump(value, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
