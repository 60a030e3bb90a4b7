"""Which processes of a test still live, wherever they went: told by a mark in their environment."""

import psutil


def processes_with(mark: str) -> list[psutil.Process]:
    """Living processes whose environment holds the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
