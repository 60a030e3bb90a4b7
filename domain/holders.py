"""Who holds something: a process by name (`host:pid`), and whether it is gone for certain.

A pid means something only where it was given, so `host` also names the pid namespace where that is
not the host's own: containers may share a host name, never a namespace.
"""

import os
import socket
import sys
from functools import cache
from pathlib import Path

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def here() -> str:
    """The name of this process."""
    return f"{_place()}:{os.getpid()}"


def is_gone(holder: str) -> bool:
    """Whether the holder was a process of this place that has ended. Elsewhere nobody can say."""
    place, _, pid = holder.rpartition(":")
    if place != _place() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@cache
def _place() -> str:
    host = socket.gethostname()
    if sys.platform != "linux":
        return host
    namespace = str(Path("/proc/self/ns/pid").readlink())
    return host if namespace == _INITIAL_PID_NAMESPACE else f"{host}/{namespace[5:-1]}"
