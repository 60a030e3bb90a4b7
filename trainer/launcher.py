"""What a rank and the torchrun that started it owe each other."""

import ctypes
import signal
import sys
from collections.abc import Mapping

from domain.errors import ConfigError

_SET_PDEATHSIG = 1
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def check(environ: Mapping[str, str]) -> None:
    """Refuse what would only fail when the ranks meet, or meet again.

    Args:
        environ: torchrun's variables.

    Raises:
        ConfigError: some are missing, or the ranks could not be started again.
    """
    if missing := [name for name in _VARIABLES if name not in environ]:
        raise ConfigError(
            f"RANK = {environ.get('RANK')!r} is set without {', '.join(missing)}; start the trainer "
            "with torchrun, or unset RANK to train in one process"
        )
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if keeps_the_store(environ) and restarts != "0":
        # One store for all worlds: the next one would read the addresses of the dead in it.
        raise ConfigError(
            f"torchrun --max-restarts {restarts} needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            "environment: without it the ranks that it starts again look for those that died"
        )


def keeps_the_store(environ: Mapping[str, str]) -> bool:
    """Whether the ranks meet in torchrun's own store, and not in one that rank 0 keeps."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def die_with_it() -> None:
    """Have the kernel end this process when torchrun dies, which could not end it any more.

    torchrun gives each rank a session of its own, so nothing else would. Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
