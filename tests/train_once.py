"""A trainer process for the crash tests: `python tests/train_once.py RUN`, services by environment.

Prints the run's final state; under torchrun it is one of several ranks. FAILPOINT kills it where a
test wants it to die, only the rank FAILPOINT_RANK where that is set. PATIENCE_S is how long it bears
with an outage, LEASE_S how long others must wait for its lease; both bound a collective of ranks. With
TELL_PUTS it prints a line `put RANK KEY` for every object it stores.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if os.environ.get("FAILPOINT_RANK") not in (None, os.environ.get("RANK")):
    os.environ.pop("FAILPOINT", None)

from domain.services import Services
from storage.objects import ObjectStore
from trainer.loop import run


def tell_puts() -> None:
    put_new = ObjectStore.put_new

    def put(store: ObjectStore, key: str, body: bytes | Path, *, sha256: str) -> bool:
        line = f"put {os.environ.get('RANK', '0')} {key}\n"
        os.write(1, line.encode())  # at once: the other rank writes to the same pipe
        return put_new(store, key, body, sha256=sha256)

    ObjectStore.put_new = put  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if "TELL_PUTS" in os.environ:
        tell_puts()
    state = run(
        sys.argv[1],
        Services.from_environment(os.environ),
        holder=f"{socket.gethostname()}:{os.getpid()}",
        patience_s=float(os.environ.get("PATIENCE_S", "20")),
        lease_s=float(os.environ.get("LEASE_S", "30")),
        environ=os.environ,
    )
    print(state)  # noqa: T201
