"""Run a program in a folder, on a leash (activities/leash.py): nothing of it outlives the call."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from activities.leash import CANNOT_START
from activities.whole import whole

logger = logging.getLogger(__name__)

LEASH = Path(__file__).with_name("leash.py")
KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "VIRTUAL_ENV")
"""Variables that programs inherit from the worker; its credentials are not among them."""

STOP_S = 4.0
"""Seconds that a leash gets to end everything, before it is killed itself."""

TAIL = 4_000
"""Bytes of output that are quoted."""


@dataclass(frozen=True, slots=True)
class Program:
    """One that runs."""

    pid: int
    """Of its leash, which it ends with."""
    exit: "asyncio.Task[int]"

    async def ended(self, seconds: float) -> int | None:
        """Its exit status, waiting so long for it; None: it still runs."""
        await asyncio.wait([self.exit], timeout=seconds)
        return self.exit.result() if self.exit.done() else None


def tail(output: Path) -> str:
    """The end of what a program printed."""
    with suppress(OSError), output.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return file.read().decode("utf-8", "replace").strip()
    return ""


def never_started(status: int, output: Path) -> bool:
    """Whether the command itself could not be run."""
    return status == CANNOT_START and tail(output).startswith("cannot start ")


@asynccontextmanager
async def running(
    argv: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
) -> AsyncIterator[Program]:
    """Start a program; leaving the block ends it with all that it started, whatever happens.

    Args:
        argv: the command; found by its PATH.
        folder: it runs in.
        env: beside the few variables it inherits.
        output: file that takes its output,
        errors: and this one its error output, if that is to be apart.
    """
    # Cancelled in the middle of starting, a process would be nobody's: it is started and ended.
    process, cancelled = await whole(_start(argv, folder, env, output, errors))
    ended = asyncio.create_task(process.wait())
    try:
        if cancelled:
            raise asyncio.CancelledError
        yield Program(process.pid, ended)
    finally:
        _, cancelled = await whole(_stop(process, ended))
        if cancelled:
            raise asyncio.CancelledError


async def _start(
    argv: Sequence[str], folder: Path, env: Mapping[str, str], output: Path, errors: Path | None
) -> asyncio.subprocess.Process:
    told = {
        "argv": list(argv),
        "cwd": str(folder),
        "env": dict(env),
        "keep": KEPT,
        "parent": os.getpid(),
    }
    with output.open("ab") as out, (errors or output).open("ab") as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", str(LEASH)),
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    assert process.stdin is not None
    # By standard input, not as arguments: everybody on the machine may read those.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(json.dumps(told).encode())
        await process.stdin.drain()
    process.stdin.close()
    return process


async def _stop(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    if not ended.done():
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait([ended], timeout=STOP_S)
    if not ended.done():
        logger.error("the leash %d did not end in %.0f s and is killed", process.pid, STOP_S)
        with suppress(ProcessLookupError):
            process.kill()
        await ended
