"""The supervisor on real child processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rollbook.stack.child import ChildFailed, Command, NotReady, Report, Restart, State
from rollbook.stack.processes import Mark, reap_leftovers
from rollbook.stack.supervise import Supervisor

ROOT = Path(__file__).resolve().parents[2]
FOREVER = "import time\nwhile True: time.sleep(60)"
# A child that leaves a grandchild in its process group and tells its id.
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])
print(child.pid, flush=True)
child.wait()
"""


def eventually(true: Callable[[], bool], within_s: float = 10) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    return Mark.of(pid) is None


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with Supervisor(tmp_path / "pids") as running:
        yield running


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Command]:
    def command(code: str, *, name: str = "child", **options: object) -> Command:
        return Command(
            name=name,
            argv=(sys.executable, "-c", code),
            log=tmp_path / f"{name}.log",
            **options,  # type: ignore[arg-type]
        )

    return command


def report(supervisor: Supervisor, name: str = "child") -> Report:
    [found] = [r for r in supervisor.reports() if r.name == name]
    return found


def test_a_killed_child_is_started_again(
    supervisor: Supervisor, python: Callable[..., Command], tmp_path: Path
) -> None:
    supervisor.start(python(FOREVER, restart=Restart(first_s=0.01)))
    supervisor.wait_ready()
    first = report(supervisor).pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: report(supervisor).restarts == 1)
    supervisor.wait_ready()
    assert report(supervisor).pid != first
    mark = Mark.read(tmp_path / "pids" / "child.pid")
    assert mark is not None
    assert mark.pid == report(supervisor).pid


def test_waits_between_restarts_grow_and_end(
    supervisor: Supervisor, python: Callable[..., Command]
) -> None:
    supervisor.start(python("raise SystemExit(3)", restart=Restart(first_s=0.05, deaths=4)))
    began = time.monotonic()
    assert supervisor.wait("child", timeout_s=20) == 3
    assert time.monotonic() - began > 0.05 + 0.1 + 0.2
    ended = report(supervisor)
    assert (ended.state, ended.restarts, ended.detail) == (State.FAILED, 3, "exited with status 3")


def test_success_is_the_end_where_only_failure_restarts(
    supervisor: Supervisor, python: Callable[..., Command]
) -> None:
    supervisor.start(python("pass", restart=Restart(after="failure")))
    assert supervisor.wait("child", timeout_s=20) == 0
    assert report(supervisor).state is State.FINISHED


def test_a_child_that_fails_to_start_shows_the_end_of_its_log(
    supervisor: Supervisor, python: Callable[..., Command]
) -> None:
    def never() -> None:
        raise NotReady("waiting for Godot")

    supervisor.start(python("raise SystemExit('no such road')", ready=never))
    with pytest.raises(ChildFailed, match="no such road"):
        supervisor.wait_ready(deaths=1)
    supervisor.start(python(FOREVER, name="other", ready=never))
    with pytest.raises(ChildFailed, match="waiting for Godot"):
        supervisor.wait_ready("other", timeout_s=0.3)


def test_a_child_that_never_gets_ready_is_killed_and_counted(
    supervisor: Supervisor, python: Callable[..., Command]
) -> None:
    def never() -> None:
        raise NotReady("waiting for Godot")

    once = Restart(deaths=1)
    supervisor.start(python(FOREVER, ready=never, ready_s=0.2, restart=once))
    assert supervisor.wait("child", timeout_s=20) == -signal.SIGKILL
    assert "not ready after 0.2 s: waiting for Godot" in report(supervisor).detail


def test_a_broken_probe_fails_the_child(
    supervisor: Supervisor, python: Callable[..., Command]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division by zero")

    supervisor.start(python(FOREVER, ready=broken))
    with pytest.raises(ChildFailed, match="ZeroDivisionError: division by zero"):
        supervisor.wait_ready()
    assert eventually(lambda: report(supervisor).pid is None)
    assert report(supervisor).state is State.FAILED


def test_stopping_takes_the_whole_process_group(
    supervisor: Supervisor, python: Callable[..., Command], tmp_path: Path
) -> None:
    supervisor.start(python(PARENT))
    log = tmp_path / "child.log"
    assert eventually(lambda: log.exists() and log.read_text().strip().isdigit())
    grandchild = int(log.read_text())
    assert not gone(grandchild)
    supervisor.stop()
    assert eventually(lambda: gone(grandchild))
    assert report(supervisor).state is State.FINISHED
    assert [*(tmp_path / "pids").iterdir()] == []


def test_a_child_that_ignores_the_stop_signal_is_killed(
    supervisor: Supervisor, python: Callable[..., Command], tmp_path: Path
) -> None:
    code = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
    )
    supervisor.start(python(code + FOREVER, stop_grace_s=0.3))
    log = tmp_path / "child.log"
    assert eventually(lambda: log.exists() and "deaf" in log.read_text())
    supervisor.stop()
    assert report(supervisor).exit_code == -signal.SIGKILL


def test_children_stop_in_parallel(supervisor: Supervisor, python: Callable[..., Command]) -> None:
    slow = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.7), sys.exit(0)))\n"
        "print('on', flush=True)\n"
    )
    commands = [python(slow + FOREVER, name=f"slow-{n}") for n in range(4)]
    supervisor.start(*commands)
    assert eventually(lambda: all(c.log.exists() and c.log.read_text() for c in commands))
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 4 * 0.7
    assert {r.exit_code for r in supervisor.reports()} == {0}


def test_states_are_told_in_order(python: Callable[..., Command], tmp_path: Path) -> None:
    told: list[State] = []
    with Supervisor(tmp_path / "pids", on_change=lambda r: told.append(r.state)) as supervisor:
        supervisor.start(python(FOREVER))
        supervisor.wait_ready()
    assert told == [State.STARTING, State.READY, State.FINISHED]


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, threading, time
from pathlib import Path
from rollbook.stack.child import Command
from rollbook.stack.supervise import Supervisor
folder = Path({str(tmp_path)!r})
supervisor = Supervisor(folder / "pids")
argv = (sys.executable, "-c", {FOREVER!r})
commands = [Command(name=f"c{{n}}", argv=argv, log=folder / f"c{{n}}.log") for n in range(3)]
# Started from a thread that ends at once: the children must not die with it.
starter = threading.Thread(target=supervisor.start, args=commands)
starter.start(); starter.join()
supervisor.wait_ready()
time.sleep(0.3)
print(*[report.pid for report in supervisor.reports()], flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    assert not any(map(gone, pids))
    process.kill()
    process.wait()
    process.stdout.close()
    assert eventually(lambda: all(map(gone, pids)), 3)


def test_leftovers_are_ended_and_strangers_with_their_ids_are_not(tmp_path: Path) -> None:
    mine = psutil.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
    other = psutil.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
    mark = Mark.of(mine.pid)
    assert mark is not None
    mark.write(tmp_path / "mine.pid")
    Mark(other.pid, "another birth").write(tmp_path / "other.pid")
    (tmp_path / "damaged.pid").write_text("?")
    assert reap_leftovers(tmp_path) == ["mine"]
    assert mine.wait(5) == -signal.SIGTERM
    assert not gone(other.pid)
    other.kill()
    other.wait()
    assert [*tmp_path.iterdir()] == []
