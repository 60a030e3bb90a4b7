"""Questions and signals to processes of the operating system, safe against reused ids."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


def born(pid: int) -> str | None:
    """When the process started, as an opaque text; None if there is no such living process.

    Together with the id this names one process for ever: ids are reused, births are not.
    """
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    listed = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listed.stdout.strip() or None


@dataclass(frozen=True, slots=True)
class Mark:
    """One process, recorded in a pidfile."""

    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> "Mark | None":
        """The mark of a living process."""
        birth = born(pid)
        return cls(pid, birth) if birth else None

    @classmethod
    def read(cls, path: Path) -> "Mark | None":
        """The mark in a pidfile; None if the file is missing or damaged."""
        try:
            pid, _, birth = path.read_text().strip().partition(" ")
            return cls(int(pid), birth)
        except (FileNotFoundError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Record it, replacing the file as a whole."""
        draft = path.with_name(path.name + ".tmp")
        draft.write_text(f"{self.pid} {self.birth}\n")
        draft.replace(path)

    def alive(self) -> bool:
        """Whether exactly this process lives."""
        return born(self.pid) == self.birth

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until it has ended; whether it did."""
        end = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the process group that `pid` leads; nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def reap_leftovers(folder: Path, *, patience_s: float = 5.0) -> list[str]:
    """End the processes that pidfiles of a dead supervisor still name; stale files are removed.

    Args:
        folder: holds the pidfiles.
        patience_s: seconds a leftover may take to end by itself (Postgres shuts down cleanly).

    Returns:
        The names of the leftovers.
    """
    found = []
    for path in sorted(folder.glob("*.pid")):
        mark = Mark.read(path)
        if mark is not None and mark.alive():
            found.append(path.stem)
            with contextlib.suppress(ProcessLookupError):
                os.kill(mark.pid, signal.SIGINT if path.stem == "postgres" else signal.SIGTERM)
            if not mark.wait_gone(patience_s):
                signal_group(mark.pid, signal.SIGKILL)
                mark.wait_gone(patience_s)
        path.unlink(missing_ok=True)
    return found
