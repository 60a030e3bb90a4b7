"""Start a stack that outlives the command that asked for it (`rollbook up`)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from domain.errors import ConfigError, RollbookError
from rollbook.stack import parts
from rollbook.stack.parts import PortWishes
from rollbook.stack.stack import Stack
from rollbook.stack.state import StateFolder

ROOT = Path(__file__).resolve().parents[2]


def start(
    state: Path,
    *,
    environ: Mapping[str, str],
    wishes: PortWishes | None = None,
    timeout_s: float = 60.0,
) -> Stack:
    """Have a process of its own run the stack; return joined to it. One that runs is joined.

    Args:
        state: the folder of data, secrets and logs.
        environ: as for `Stack.up`; the process gets it whole.
        wishes: ports asked for by name.
        timeout_s: longest start.

    Raises:
        ConfigError: as for `Stack.up`.
        RollbookError: the process ended; the end of its log is in the text.
    """
    folder = StateFolder(state)
    if parts.embedded_in(environ) and folder.published() is None:
        _spawn(folder, environ, wishes or PortWishes(), timeout_s)
    folder.release()
    stack = Stack.up(state, environ=environ, wishes=wishes, timeout_s=timeout_s)
    if stack.supervisor is not None:
        stack.down()
        raise RollbookError(f"the stack ended right after its start; read {folder.logs}")
    return stack


def _spawn(
    folder: StateFolder, environ: Mapping[str, str], wishes: PortWishes, timeout_s: float
) -> None:
    options = [part for n, p in wishes.asked().items() for part in (parts.option(n), str(p))]
    path = folder.logs / "stack.log"
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollbook.stack", "--state", str(folder.path), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, "PYTHONPATH": os.fspath(ROOT)},
            start_new_session=True,
        )
    # Collects its exit status whenever it ends, in case this process outlives it.
    threading.Thread(target=process.wait, name="stack", daemon=True).start()
    end = time.monotonic() + timeout_s
    while folder.published() is None:
        code = process.poll()
        if code is not None:
            said = path.read_text(errors="replace").strip()
            if code == 2:
                raise ConfigError(said)
            if code != 0:  # 0: another process runs the stack
                raise RollbookError(f"the stack did not start (status {code}): {said}")
            return
        if time.monotonic() > end:
            process.terminate()
            raise RollbookError(f"the stack was not up after {timeout_s:g} s; read {path}")
        time.sleep(0.05)
