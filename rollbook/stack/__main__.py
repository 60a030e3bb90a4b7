"""A stack in a process of its own, until SIGTERM: what `rollbook up` leaves running.

Errors that a person can mend end with status 2 and one message on standard error.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path
from types import FrameType

from domain.errors import ConfigError, RollbookError
from rollbook.stack.parts import PortWishes, option
from rollbook.stack.stack import Stack


def main(arguments: list[str]) -> int:
    """Run until asked to stop."""
    parser = argparse.ArgumentParser(prog="python -m rollbook.stack", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of data, secrets, logs")
    for wish in fields(PortWishes):
        parser.add_argument(option(wish.name), type=int, dest=wish.name)
    given = parser.parse_args(arguments)
    wishes = PortWishes(**{wish.name: getattr(given, wish.name) for wish in fields(PortWishes)})
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    try:
        with Stack.up(given.state, environ=os.environ, wishes=wishes) as stack:
            if stack.joined is not None:
                print(f"process {stack.joined.pid} runs this stack already", file=sys.stderr)
                return 0
            threading.Event().wait()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except RollbookError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _leave(number: int, _: FrameType | None) -> None:
    """Leave through the context managers; a second signal must not cut the stop short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
