"""The vLLM process beside a front: started with the first weights, watched, ended with the front.

A server that ended or hangs is not revived under the same name: its front takes a new incarnation
and holds nothing, the steward loads what the ledger wants, and the first load starts a new server.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from domain.errors import ConfigError, EngineError, EngineUnavailable
from engine.vllm.command import Settings, argv, environment, is_cpu_build
from engine.vllm.control import Control
from storage import scratch

log = logging.getLogger(__name__)

START_S = 900.0
"""Longest start of a server: large weights, cold disks."""
STOP_S = 15.0
_TAIL_LINES = 40
_PR_SET_PDEATHSIG = 1
_SOCKETS_MOST = 103 - len("/01234567-89ab-cdef-0123-456789abcdef")
"""Letters of a folder in which vLLM can make its sockets: macOS takes 103 for a whole path."""


class Server(Protocol):
    """A server that can be asked, started or not."""

    @property
    def control(self) -> Control:
        """Its routes. Raises EngineUnavailable while there is no server."""
        ...

    async def ensure(self, model: Path, dtype: str) -> bool:
        """See that it serves this model; True if it was started for that, with these weights."""
        ...

    async def alive(self) -> bool:
        """Whether the server that was there last is there and answers; True before the first."""
        ...

    async def stop(self) -> None:
        """End it, if it is ours to end."""
        ...


class OwnServer:
    """A vLLM process that this front starts when it first needs it."""

    def __init__(self, settings: Settings, outside: Mapping[str, str], log_file: Path) -> None:
        """Nothing is started yet.

        Args:
            settings: how to start it.
            outside: environment to pass on.
            log_file: where its output goes.

        Raises:
            ConfigError: the interpreter has no vLLM.
        """
        self._cpu = is_cpu_build(settings.python)
        if self._cpu and settings.sampling_masks:
            raise ConfigError(
                "vLLM's CPU build does not report kept sets, which filtered sampling (top_p, top_k, "
                'min_p) needs; sample unfiltered, or with engine.kind = "builtin"'
            )
        self._settings = settings
        self._outside = dict(outside)
        self._log_file = log_file
        self._litter = contextlib.ExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._control: Control | None = None

    @property
    def control(self) -> Control:
        """Its routes. Raises EngineUnavailable while there is no server."""
        if self._control is None:
            raise EngineUnavailable("the vLLM server is not running")
        return self._control

    async def ensure(self, model: Path, dtype: str) -> bool:
        """Start a server on this model folder if there is none; whether it was started.

        Raises:
            EngineUnavailable: it did not come up; the end of its log is in the text.
        """
        if self._process is not None and self._process.returncode is None:
            return False
        await self.stop()
        port = _free_port()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        command = argv(self._settings, model, port, dtype, cpu=self._cpu)
        sockets = self._litter.enter_context(scratch.folder("vllm", socket_place()))
        log.info("starting vLLM on port %d with %s", port, model)
        with self._log_file.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(self._settings, self._outside, sockets, cpu=self._cpu),
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                start_new_session=True,
            )
        control = control_of(f"http://127.0.0.1:{port}", self._settings)
        try:
            await self._until_ready(control)
        except BaseException:
            await control.aclose()
            await self.stop()
            raise
        self._control = control
        return True

    async def alive(self) -> bool:
        """Whether the process runs and answers; True while none was started."""
        if self._process is None or self._control is None:
            return True
        return self._process.returncode is None and await self._control.healthy()

    async def stop(self) -> None:
        """End the process and everything it started, and remove what it leaves."""
        with self._litter.pop_all():
            await self._end()

    async def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            await control.aclose()
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        # Its own session: the engine core and the workers end too, whatever became of the server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _until_ready(self, control: Control) -> None:
        assert self._process is not None
        until = time.monotonic() + START_S
        while not await control.healthy():
            if self._process.returncode is not None:
                raise EngineUnavailable(
                    f"vLLM ended with {self._process.returncode} while it started: {self._tail()}"
                )
            if time.monotonic() > until:
                raise EngineUnavailable(
                    f"vLLM was not ready within {START_S:.0f} s: {self._tail()}"
                )
            await asyncio.sleep(0.25)

    def _tail(self) -> str:
        with self._log_file.open(errors="replace") as lines:
            last = [line for line in deque(lines, _TAIL_LINES) if "error" in line.lower()]
        return f"{' '.join(last[-2:]).strip()[-1500:]} (all of it in {self._log_file})"


class AttachedServer:
    """A vLLM server that somebody else keeps, on a machine that shares the front's cache folder.

    It must run with the flags and variables of `command.py`, the run's base model, and the served
    name `base`.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        """Nothing is asked yet.

        Args:
            url: its base URL.
            settings: how whoever keeps it has started it.
        """
        self._settings = settings
        self._control = control_of(url, settings)
        self._started: float | None = None

    @property
    def control(self) -> Control:
        """Its routes."""
        return self._control

    async def ensure(self, model: Path, dtype: str) -> bool:
        """Check that it answers; its weights are unknown, so the first load replaces them.

        Raises:
            EngineUnavailable: it does not.
        """
        if not await self._control.healthy():
            raise EngineUnavailable(f"vLLM at {self._control.url} does not answer /health")
        if self._started is None:
            self._started = await self._start_time()
            for name in await self._control.models():
                if "@" in name:  # an earlier front's, whose folder may be gone
                    await self._control.unload_adapter(name)
        return False

    async def alive(self) -> bool:
        """Whether it answers and is the process that it was."""
        if self._started is None:
            return True
        try:
            return await self._control.healthy() and await self._start_time() == self._started
        except EngineError:
            return False

    async def stop(self) -> None:
        """Forget which process it was, and hang up."""
        self._started = None
        control, self._control = self._control, control_of(self._control.url, self._settings)
        await control.aclose()

    async def _start_time(self) -> float:
        found = re.search(
            r"^process_start_time_seconds (\S+)", await self._control.metrics(), re.MULTILINE
        )
        if found is None:
            raise EngineUnavailable(f"vLLM at {self._control.url} does not tell when it started")
        return float(found[1])


def control_of(url: str, settings: Settings) -> Control:
    """The routes of a server that was started so."""
    return Control(url, connections=2 * settings.max_batch, kept_sets=settings.sampling_masks)


def socket_place() -> Path:
    """Where a folder for a server's sockets may be made: TMPDIR unless that is too long."""
    place = Path(tempfile.gettempdir())
    name = scratch.prefix("vllm") + 8 * "x"
    return place if len(str(place / name)) <= _SOCKETS_MOST else Path("/tmp")


def _die_with_parent() -> None:
    """In the child, before it becomes vLLM: end when the front ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
