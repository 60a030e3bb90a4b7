"""Child processes that are kept running, and that never outlive their supervisor.

A `Supervisor` starts commands, probes them until they are ready, starts them again when they die,
and stops them with everything they started. One thread forks, waits and restarts. That thread
lives as long as the supervisor, which matters: the kernel's parent-death signal (launch.py) fires
when the *thread* that forked ends, so a child forked by a short-lived thread would die with it.
When the process is killed -9 the thread ends too, and with it every child.

    absent --start--> starting --probe answers--> ready
                         ^  |                       |
         back-off over   |  `--- died --------------'
                         |          |
                      waiting <-----+-----> finished   exited 0, or asked to stop
                                    `-----> failed     too many deaths in a row, or a broken probe
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

from rollbook.stack import processes
from rollbook.stack.child import Child, ChildFailed, Command, NotReady, Report, State
from rollbook.stack.processes import Mark

log = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launch.py")
_TICK_S = 0.05
_LOG_LIMIT_BYTES = 32 * 2**20


class Supervisor:
    """Runs commands until it is closed. All methods may be called from any thread."""

    def __init__(self, folder: Path, *, on_change: Callable[[Report], None] | None = None) -> None:
        """Start the supervising thread.

        Args:
            folder: for the pidfiles, `NAME.pid`.
            on_change: told each new state of each child, from the supervising thread; must be quick.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._on_change = on_change
        self._children: dict[str, Child] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, *commands: Command) -> None:
        """Have the commands started. Returns at once; see `wait_ready`."""
        with self._changed:
            for command in commands:
                held = self._children.get(command.name)
                if held is not None and held.process is not None:
                    raise ValueError(f"child {command.name!r} is running already")
                self._children[command.name] = Child(command)
            self._changed.notify_all()

    def wait_ready(self, *names: str, timeout_s: float = 60.0, deaths: int = 3) -> None:
        """Wait until the named children (default: all) are ready.

        Raises:
            ChildFailed: one failed, died `deaths` times meanwhile, or the time is over.
        """
        with self._changed:
            children = [self._children[name] for name in names or self._children]
            before = {c.command.name: c.deaths for c in children}

            def settled() -> bool:
                return all(c.state is State.READY for c in children) or bool(lost())

            def lost() -> list[Child]:
                ended = (State.FAILED, State.FINISHED)
                return [
                    c
                    for c in children
                    if c.state in ended or c.deaths - before[c.command.name] >= deaths
                ]

            in_time = self._changed.wait_for(settled, timeout_s)
            if broken := lost():
                raise ChildFailed("; ".join(c.describe() for c in broken))
            if not in_time:
                late = [c for c in children if c.state is not State.READY]
                raise ChildFailed(
                    f"not ready after {timeout_s:g} s: " + "; ".join(c.describe() for c in late)
                )

    def wait(self, name: str, *, timeout_s: float | None = None) -> int | None:
        """Wait until the child has finished or failed; its exit code, None when time is over."""
        with self._changed:
            child = self._children[name]
            ended = (State.FINISHED, State.FAILED)
            self._changed.wait_for(lambda: child.state in ended, timeout_s)
            return child.exit_code if child.state in ended else None

    def reports(self) -> list[Report]:
        """The state of every child, in the order of their start."""
        with self._changed:
            return [child.report() for child in self._children.values()]

    def describe(self, name: str) -> str:
        """A child that is not well, in words, with the end of what its last process logged."""
        with self._changed:
            return self._children[name].describe()

    def stop(self, *names: str) -> None:
        """Stop the named children (default: all) in parallel and wait until they are gone."""
        with self._changed:
            children = [self._children[name] for name in names or self._children]
            for child in children:
                child.wanted = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(c.process is None for c in children))

    def kill(self, *names: str) -> None:
        """As `stop`, but with SIGKILL at once."""
        with self._changed:
            for name in names or self._children:
                self._children[name].wanted = False
                self._children[name].kill_at = 0.0
        self.stop(*names)

    def close(self) -> None:
        """Stop everything and end the supervising thread."""
        self.stop()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The supervising thread.

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                for child in list(self._children.values()):
                    self._turn(child, time.monotonic())
                self._changed.wait(_TICK_S)

    def _turn(self, child: Child, now: float) -> None:
        if child.process is None:
            if not child.wanted:
                if child.state not in (State.FINISHED, State.FAILED):
                    self._enter(child, State.FINISHED, "stopped")
            elif child.state is State.WAITING and now >= child.due:
                self._fork(child, now)
            return
        if _has_exited(child.process):
            # While the leader is still a zombie its id cannot be reused, so the group is its own.
            processes.signal_group(child.process.pid, signal.SIGKILL)
            self._ended(child, child.process.wait(), now)
        elif not child.wanted:
            if child.kill_at is None:
                child.kill_at = now + child.command.stop_grace_s
                child.process.send_signal(child.command.stop_signal)
            elif now >= child.kill_at:
                processes.signal_group(child.process.pid, signal.SIGKILL)
        elif child.state is State.STARTING:
            self._judge_start(child, now)

    def _judge_start(self, child: Child, now: float) -> None:
        assert child.process is not None
        if child.probe is not None and child.probe.done():
            if error := child.probe.exception():
                child.wanted = False
                self._enter(child, State.FAILED, f"{type(error).__name__}: {error}")
            else:
                child.ready_since = now
                self._enter(child, State.READY)
        elif now > child.started + child.command.ready_s:
            child.detail = f"not ready after {child.command.ready_s:g} s: {child.waiting_for}"
            processes.signal_group(child.process.pid, signal.SIGKILL)

    def _fork(self, child: Child, now: float) -> None:
        command = child.command
        _set_aside(command.log)
        launch = (sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()))
        with command.log.open("ab") as output:
            child.log_offset = output.tell()
            child.process = subprocess.Popen(
                (*launch, str(int(command.death_signal)), command.identity, *command.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=command.env,
                cwd=command.cwd,
                start_new_session=True,
            )
        if mark := Mark.of(child.process.pid):
            mark.write(self._pidfile(child))
        child.started, child.kill_at, child.ready_since = now, None, None
        child.starts += 1
        child.probe = Future()
        self._enter(child, State.STARTING)
        threading.Thread(
            target=self._probe,
            args=(child, child.process, child.probe),
            name=f"probe {command.name}",
            daemon=True,
        ).start()

    def _probe(
        self, child: Child, process: subprocess.Popen[bytes], answer: "Future[None]"
    ) -> None:
        """In a thread of its own: ask until the child is ready or gone."""
        while process.returncode is None:
            try:
                if child.command.ready is not None:
                    child.command.ready()
            except NotReady as reason:
                child.waiting_for = str(reason)
                time.sleep(0.03)
            except BaseException as error:  # noqa: BLE001 - handed to the supervising thread
                answer.set_exception(error)
                break
            else:
                answer.set_result(None)
                break
        with self._changed:
            self._changed.notify_all()

    def _ended(self, child: Child, code: int, now: float) -> None:
        self._pidfile(child).unlink(missing_ok=True)
        for left in child.command.litter:
            with suppress(OSError):
                left.unlink()
        rule = child.command.restart
        steady = child.ready_since is not None and now - child.ready_since >= rule.steady_s
        child.process, child.exit_code = None, code
        child.deaths = 1 if steady else child.deaths + 1
        if child.state is State.FAILED:
            self._enter(child, State.FAILED, child.detail)
        elif not child.wanted or (code == 0 and rule.after == "failure"):
            self._enter(child, State.FINISHED, "stopped" if not child.wanted else "exited 0")
        elif (
            rule.after == "never"
            or code in rule.refusals
            or (rule.deaths is not None and child.deaths >= rule.deaths)
        ):
            child.wanted = False
            self._enter(child, State.FAILED, child.detail or _exit_text(code))
        else:
            child.due = now + min(rule.first_s * 2 ** min(child.deaths - 1, 30), rule.most_s)
            self._enter(child, State.WAITING, _exit_text(code))
            log.warning("%s %s, started again", child.command.name, _exit_text(code))

    def _enter(self, child: Child, state: State, detail: str = "") -> None:
        child.state, child.detail = state, detail
        self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(child.report())

    def _pidfile(self, child: Child) -> Path:
        return self._folder / f"{child.command.name}.pid"


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _exit_text(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _set_aside(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
        path.replace(path.with_name(path.name + ".1"))
