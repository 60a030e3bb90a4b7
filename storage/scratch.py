"""Folders for what one process needs for a while: removed at its end, or by the next one's start.

Whoever uses a folder holds a lock on it, which ends with the process however that ends. So what a
process that was killed left behind (weights of gigabytes, a program's files) is recognised, and
removed by the next one that asks for a folder of the same kind on this machine.
"""

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

YOUNG_S = 60.0
"""A folder of this age may have been made by somebody who is about to lock it."""


@contextmanager
def folder(kind: str, within: Path | None = None) -> Iterator[Path]:
    """A new folder, closed to others.

    Args:
        kind: what it is for, a word; folders of dead processes of this kind are removed first.
        within: where; None: the system's place for temporary files (TMPDIR).
    """
    place = within or Path(tempfile.gettempdir())
    begin = prefix(kind)
    _sweep(place, begin)
    path = Path(tempfile.mkdtemp(prefix=begin, dir=place))
    held = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def prefix(kind: str) -> str:
    """How the names of this kind's folders begin on this machine.

    A lock holds on one machine only, and several may share the place. Their names may be long, and
    whoever makes sockets in a folder has a hundred letters for the whole path.
    """
    machine = blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    return f"rollbook-{kind}-{machine}-"


def _sweep(place: Path, begin: str) -> None:
    for path in place.glob(f"{begin}*"):
        with suppress(OSError):  # others look too, and folders of other users are not ours to open
            if time.time() - path.stat().st_mtime < YOUNG_S:
                continue
            held = _lock(path)
            if held is not None:
                log.info("removing %s, which a dead process has left", path)
                shutil.rmtree(path, ignore_errors=True)
                os.close(held)


def _lock(path: Path) -> int | None:
    """The folder, locked until it is closed; None if somebody holds it."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held
