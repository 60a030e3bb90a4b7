"""How commands that run until they are told to stop are told."""

import signal
import threading


def stop_signal() -> threading.Event:
    """Set at SIGTERM or SIGINT.

    By a thread: the handler interrupts the main thread, which may hold the event's own lock.
    """
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=told.set).start())
    return told
