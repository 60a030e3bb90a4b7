"""A Python process whose clock is wrong."""

import os
from pathlib import Path

from rollbook.root import ROOT

CLOCK = '''
"""The clock of the wall is wrong by SHIFT seconds; what measures durations is not."""

import datetime as module
import time

wall = time.time
time.time = lambda: wall() + SHIFT
time.time_ns = lambda: int(time.time() * 1e9)


right = module.datetime


class Alike(type):
    def __instancecheck__(cls, value):
        return isinstance(value, right)


class datetime(right, metaclass=Alike):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + module.timedelta(seconds=SHIFT)

    @classmethod
    def utcnow(cls):
        return cls.now(module.UTC).replace(tzinfo=None)


module.datetime = datetime
'''


def wrong_clock(folder: Path, seconds: float) -> dict[str, str]:
    """What to add to the environment of a Python process so that its clock is wrong."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(CLOCK.replace("SHIFT", repr(seconds)))
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
