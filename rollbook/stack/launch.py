"""The last step before a child's program: who it runs as, and that it dies with its supervisor.

Run as a script, `python -I -S launch.py PARENT SIGNAL IDENTITY PROGRAM ARG...`, standard library
only. It keeps its process id through `exec`, so the supervisor sees the program itself. A separate
program instead of a `preexec_fn`: no Python code runs between fork and exec of a threaded parent.
"""

import ctypes
import os
import pwd
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER = 0x10000000


def main(arguments: list[str]) -> None:
    """Take the identity, tie this process to its parent, become the program."""
    parent, signal_number, identity, *program = arguments
    if identity == "nobody":
        _drop_to_nobody()
    elif identity == "mapped":
        _map_to_nobody()
    if sys.platform == "linux":
        # After the change of identity, which clears the setting.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
        if os.getppid() != int(parent):
            raise SystemExit("the supervisor died first")
    os.execv(program[0], program)


def _drop_to_nobody() -> None:
    account = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.environ["HOME"] = "/"


def _map_to_nobody() -> None:
    """Look like `nobody` to the program while files still see the real user (user namespace)."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        raise SystemExit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    account = pwd.getpwnam("nobody")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{account.pw_uid} {user} 1"),
        ("gid_map", f"{account.pw_gid} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
