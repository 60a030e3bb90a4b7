"""What a `Supervisor` keeps running: the command, the rule of its restarts, and where it stands."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from domain.errors import RollbookError

_TAIL_BYTES = 2000


class State(StrEnum):
    """Where a child stands; see the drawing in supervise.py."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"


class NotReady(Exception):
    """A probe raises this while the child needs more time; the text says what it waits for."""


class ChildFailed(RollbookError):
    """A child did not become ready, or died too often; the text holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """When a child that ended is started again. The n-th wait is `first_s * 2**n`, bounded."""

    after: Literal["always", "failure", "never"] = "always"
    """`failure`: an exit with status 0 is the end."""
    first_s: float = 0.1
    most_s: float = 10.0
    steady_s: float = 30.0
    """A child that was ready for so many seconds starts with a clean record."""
    deaths: int | None = None
    """Deaths in a row after which it is given up; None never."""
    refusals: frozenset[int] = frozenset()
    """Exit codes that say that another start would end the same way: given up at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to keep running."""

    name: str
    argv: tuple[str, ...]
    log: Path
    """Its output, appended; set aside as `.1` at start when it has grown large."""
    env: Mapping[str, str] | None = None
    """The whole environment; None hands on this process's own."""
    cwd: Path = Path("/")
    identity: Literal["same", "nobody", "mapped"] = "same"
    """`mapped`: looks like nobody from inside, keeps the files of the real user."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = 20.0
    """Seconds from the stop signal to SIGKILL."""
    death_signal: signal.Signals = signal.SIGKILL
    """Sent by the kernel when the supervisor dies."""
    ready: Callable[[], None] | None = None
    """Called until it no longer raises NotReady; any other exception fails the child."""
    ready_s: float = 60.0
    """Longest start; a child that takes longer is killed, which counts as a death."""
    restart: Restart = Restart()
    litter: tuple[Path, ...] = ()
    """Files outside its folder that it never removes; they are, each time it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the supervisor knows of one child."""

    name: str
    state: State
    pid: int | None
    restarts: int
    exit_code: int | None
    """Of the last process that ended; negative is the signal that killed it."""
    detail: str


@dataclass(slots=True)
class Child:
    """A command that is kept running, and what became of it so far."""

    command: Command
    state: State = State.WAITING
    wanted: bool = True
    due: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    probe: Future[None] | None = None
    started: float = 0.0
    ready_since: float | None = None
    kill_at: float | None = None
    deaths: int = 0
    """In a row."""
    starts: int = 0
    exit_code: int | None = None
    detail: str = ""
    log_offset: int = 0
    waiting_for: str = field(default="", repr=False)

    def report(self) -> Report:
        """For people, and for `--json`."""
        return Report(
            name=self.command.name,
            state=self.state,
            pid=self.process.pid if self.process else None,
            restarts=max(0, self.starts - 1),
            exit_code=self.exit_code,
            detail=self.detail or (self.waiting_for if self.state is State.STARTING else ""),
        )

    def describe(self) -> str:
        """A child that is not well, in words, with the end of what its last process logged."""
        said = tail(self.command.log, self.log_offset)
        why = self.detail or self.waiting_for or "no answer"
        return f"{self.command.name}: {why}; the end of {self.command.log}:\n{said}"


def tail(path: Path, offset: int = 0) -> str:
    """The end of a log, from `offset` on."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
