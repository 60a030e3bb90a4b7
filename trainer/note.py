"""The error that all ranks leave with when they can no longer vote on one.

What breaks in the middle of a sum breaks where the others cannot be told: they are in the sum. It is
noted in the store where the ranks met, the first note standing. The process leaves, its connections
close, and a rank whose collective then raises reads the note and leaves with that.

Two things could keep a rank from it. A GPU waits for a peer that is gone without a word, in a call
that nothing interrupts: there a thread watches for the note. And where rank 0 keeps the store itself
(it is torchrun's own otherwise), it stays until the others have read.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event

from torch.distributed.distributed_c10d import Store

_KEY, _READERS = "rollbook/broken", "rollbook/leaving"
_LOOK_S = 1.0
STUCK_S = 4.0
"""Seconds after another rank's note for which this one may still get out by itself."""
_STAY_S = 10.0

log = logging.getLogger(__name__)


class RankBroken(RuntimeError):
    """Another rank raised what this one has no class for."""


class RankLost(RuntimeError):
    """Another rank is gone without a word, or was silent for too long: this process ends."""


class Note:
    """What stands in the store of one world."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def leave(self, error: Exception) -> Exception:
        """Note an error, unless one stands there already; the one to leave with."""
        mine = json.dumps(described(error))
        try:
            noted = self._store.compare_set(_KEY, "", mine).decode()
            self._store.add(_READERS, 1)
        except RuntimeError:  # rank 0 may have taken the store with it
            noted = mine
        return error if noted == mine else rebuilt(json.loads(noted))

    def watch(self, leaving: Event) -> None:
        """End this process if another rank leaves a note and this one cannot get out to read it.

        The exit code is 0: what the failure means for the run is decided by who noted it.

        Args:
            leaving: set once this rank leaves by itself.
        """
        while not leaving.wait(_LOOK_S):
            try:
                noted = self._store.check([_KEY])
                error = rebuilt(json.loads(self._store.get(_KEY))) if noted else None
            except RuntimeError:
                error = RankBroken("rank 0 has left, with the store where the ranks met")
            if error is not None and not leaving.wait(STUCK_S):
                log.error("this rank waits on its device for one that has left: %r", error)
                for handler in logging.getLogger().handlers:
                    handler.flush()
                os._exit(0)

    def stay(self, ranks: int) -> None:
        """Keep the store until so many have read the note, or have had time to."""
        give_up = time.monotonic() + _STAY_S
        with suppress(RuntimeError):
            while self._store.add(_READERS, 0) < ranks and time.monotonic() < give_up:
                time.sleep(0.1)


def described(error: Exception) -> list[str]:
    """An error as the other ranks can raise it: module, class and text."""
    return [type(error).__module__, type(error).__qualname__, str(error)]


def rebuilt(told: Sequence[str]) -> Exception:
    """Another rank's error, as this rank raises it."""
    module, name, text = told
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # some take more than a text
            if str(found := kind(text)) == text:
                return found
    return RankBroken(f"{name}: {text}")
