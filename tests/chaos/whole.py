"""The `rollbook` command with everything it starts, as one thing that can be killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg.rows import DictRow, dict_row

from rollbook.root import ROOT
from rollbook.stack.state import StateFolder
from tests.chaos.walk import configuration


@dataclass
class Whole:
    """A state folder, and the commands that run in it."""

    state: Path
    commands: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @classmethod
    @contextmanager
    def folder(cls) -> "Iterator[Whole]":
        """A new state folder; whatever runs in it is killed in the end."""
        state = Path(tempfile.mkdtemp(prefix="rollbook-whole-"))
        state.chmod(0o711)  # Postgres steps down to nobody, who must pass
        whole = cls(state)
        try:
            yield whole
        finally:
            for command in whole.commands:
                whole.kill(command)
            shutil.rmtree(state, ignore_errors=True)

    def rollbook(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """The command in a session of its own, with none of the caller's services."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLBOOK_", "AWS_"))}
        with self.log.open("ab") as log:
            command = subprocess.Popen(
                [sys.executable, "-m", "rollbook", *arguments, "--state", str(self.state)],
                env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.commands.append(command)
        return command

    @property
    def log(self) -> Path:
        return self.state / "command.log"

    @staticmethod
    def kill(command: "subprocess.Popen[bytes]") -> None:
        """SIGKILL to a command and everything it started, all frozen first."""
        if command.poll() is not None:
            return
        family = [psutil.Process(command.pid)]
        family += family[0].children(recursive=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in family:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
        command.wait()
        psutil.wait_procs(family, timeout=20)

    def until(self, holds: Callable[[], Any], what: str, *, timeout_s: float = 150) -> Any:
        """Poll until something holds; the answer."""
        end = time.monotonic() + timeout_s
        while not (found := holds()):
            if time.monotonic() > end:
                raise AssertionError(f"not yet: {what}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return found

    def ask(self, query: str, *args: Any) -> list[DictRow]:
        """Rows of the ledger, as far as there is one."""
        found = StateFolder(self.state).published() if (self.state / "lock").exists() else None
        if found is None:
            return []
        try:
            with psycopg.connect(
                found.services.database_url,
                row_factory=dict_row,
                options="-c search_path=ledger",
                connect_timeout=5,
            ) as connection:
                return connection.execute(query, args or None).fetchall()
        except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
            return []  # it is being made, or coming up

    def in_full_work(self) -> bool:
        """A step is applied and not durable, members have finished, others are half way."""
        rows = self.ask(
            """
            SELECT (SELECT next_step > durable_step AND durable_step > 0 FROM runs)
                AND EXISTS (SELECT 1 FROM attempts WHERE state = 'running' AND policy_tokens > 1)
                AND EXISTS (SELECT 1 FROM attempts a JOIN groups g USING (run_id, group_id)
                    WHERE a.member AND g.state = 'submitted') AS busy
            """
        )
        return bool(rows and rows[0]["busy"])


def write_toml(folder: Path, name: str, **sections: Any) -> Path:
    """The stage's configuration as a file, with the product's own time limits."""
    settings = {"steps": 9, "checkpoint": {"every": 3, "keep": 100}, "groups": {"heartbeat": 60.0}}
    table = configuration(name, folder, **(settings | sections)).model_dump(
        exclude_none=True, exclude_defaults=True, exclude={"root"}
    )
    lines = [f"{key} = {json.dumps(v)}" for key, v in table.items() if not isinstance(v, dict)]
    for section, values in table.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
