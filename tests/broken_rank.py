"""One of two ranks, one of which fails: `python tests/broken_rank.py RUN`, under torchrun.

`BREAK=point:rank` in the environment makes that rank raise where a failpoint stands. Every rank
prints as JSON what it raised and when, and everybody's clock is the same one.
"""

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from domain import failpoints
from domain.errors import DataChanged
from domain.services import Services
from trainer.loop import run

FAILURE = DataChanged("somebody has exchanged the data")


class Teller(logging.Handler):
    """Tells of each logged exception."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]):
            tell(raised=[type(error).__name__, str(error)])


def tell(**what: object) -> None:
    told = json.dumps(what | {"rank": int(os.environ["RANK"]), "at": time.time()})
    os.write(1, f"{told}\n".encode())  # at once: the other rank writes to the same pipe


def break_at(setting: str) -> None:
    """Raise on one rank, the second time it gets to that point: in a step, not before the first."""
    point, _, rank = setting.partition(":")
    seen = []

    def reach(name: str) -> None:
        seen.append(name)
        if name == point and os.environ["RANK"] == rank and seen.count(name) == 2:
            tell(broke=point)
            raise FAILURE

    failpoints.reach = reach


if __name__ == "__main__":
    logging.getLogger().addHandler(Teller(logging.ERROR))
    break_at(os.environ["BREAK"])
    state = run(
        sys.argv[1],
        Services.from_environment(os.environ),
        holder=f"{socket.gethostname()}:{os.getpid()}",
        patience_s=20,
        environ=os.environ,
    )
    tell(state=state)
