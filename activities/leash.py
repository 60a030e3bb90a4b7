"""The last step before a program of a harness: everything it starts ends with its attempt.

Run as a script, standard library only. Reads from standard input what to run, becomes the reaper of
whatever the program leaves behind, and waits. When the program ends, when it is told to (SIGTERM)
or when the worker dies (the kernel sends SIGTERM then), it ends all descendants, also those that
left the process group or lost their parent, and exits with the program's status.

Only on Linux are descendants found wherever they went; elsewhere it is the process group that ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINUX = sys.platform == "linux"

POLITE_S = 1.5
"""Seconds between SIGTERM and SIGKILL."""
CANNOT_START = 127
STOPPED = 143
"""Exit status of a program that was told to end."""
WAITED_FOR = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}


def main() -> int:
    """Run the program of standard input; its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    told = json.load(sys.stdin)
    if LINUX:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != told["parent"]:
            return STOPPED
    program = os.fork()
    if program == 0:
        _become(told)
    status = _wait_for(program)
    _end_descendants(program)
    if status is None:
        status = _reaped.get(program, STOPPED)
    return status if status >= 0 else 128 - status


def _become(told: dict[str, object]) -> None:
    """In the child: its own session, and nothing of the worker's secrets."""
    try:
        os.setsid()
        if LINUX:
            # Should the leash itself be killed -9.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.chdir(str(told["cwd"]))
        keep, env = told["keep"], told["env"]
        assert isinstance(keep, list)
        assert isinstance(env, dict)
        kept = {name: os.environ[name] for name in keep if name in os.environ}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
        argv = told["argv"]
        assert isinstance(argv, list)
        os.execvpe(argv[0], argv, kept | env)
    except OSError as error:
        sys.stderr.write(f"cannot start {told['argv']}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(CANNOT_START)


_reaped: dict[int, int] = {}


def _wait_for(program: int) -> int | None:
    """The program's exit status; None: told to stop before it ended."""
    while program not in _reaped:
        received = signal.sigtimedwait(WAITED_FOR, 5.0)
        if received is not None and received.si_signo != signal.SIGCHLD:
            return None
        _reap()
    return _reaped[program]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _reaped[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _end_descendants(program: int) -> None:
    """SIGTERM, then SIGKILL until nobody is left."""
    give_up = time.monotonic() + POLITE_S
    _send(program, signal.SIGTERM)
    while _alive(program) and time.monotonic() < give_up:
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reap()
    while _alive(program):
        _send(program, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.01)
        _reap()


def _send(program: int, number: signal.Signals) -> None:
    for pid in _descendants() if LINUX else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program, number)


def _alive(program: int) -> bool:
    _reap()
    return bool(_descendants()) if LINUX else program not in _reaped


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # After the command's name, which may hold anything: state, parent.
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found.extend(generation)
    return found


if __name__ == "__main__":
    sys.exit(main())
