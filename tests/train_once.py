"""A trainer process for the crash tests: `python tests/train_once.py RUN`, services by environment.

Prints the run's final state; under torchrun it is one of several ranks. FAILPOINT kills it where a test wants it to die,
only the rank FAILPOINT_RANK where that is set.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if os.environ.get("FAILPOINT_RANK") not in (None, os.environ.get("RANK")):
    os.environ.pop("FAILPOINT", None)

from domain.services import Services
from trainer.loop import run

if __name__ == "__main__":
    state = run(
        sys.argv[1],
        Services.from_environment(os.environ),
        holder=f"{socket.gethostname()}:{os.getpid()}",
        patience_s=20,
        environ=os.environ,
    )
    print(state)  # noqa: T201
