"""Free loopback ports, near the ones people know."""

import random
import socket
from collections.abc import Callable, Iterable

from domain.errors import ConfigError

LOOPBACK = "127.0.0.1"
# Below the kernel's ephemeral range (32768..), so that no outgoing connection takes one between
# the choice and the bind; low enough that P + 10000 stays below it too (SeaweedFS gRPC ports).
_RANGE = range(15000, 22000)
_DICE = random.SystemRandom()  # a step of training seeds the ordinary one: processes would collide
_TRIES = 400


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a connection of an earlier server in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    """Whether something listens on this loopback port."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def choose(
    preferred: int,
    taken: Iterable[int] = (),
    *,
    companion: int = 0,
    suits: Callable[[int], bool] = lambda _: True,
) -> int:
    """The preferred port if it is free, else a random free one.

    Args:
        preferred: tried first; 0 has no preference.
        taken: ports promised to someone else already.
        companion: a distance; port + companion must be free as well.
        suits: what else a server needs of its port.
    """
    blocked = set(taken)

    def fits(port: int) -> bool:
        pair = {port, port + companion}
        if pair & blocked or max(pair) > 65535:
            return False
        return all(is_free(p) for p in pair) and suits(port)

    if preferred and fits(preferred):
        return preferred
    for port in _DICE.sample(_RANGE, _TRIES):
        if fits(port):
            return port
    raise ConfigError(
        f"no free port among {_TRIES} tried in {_RANGE.start}-{_RANGE.stop - 1} on {LOOPBACK}"
    )


def free_port() -> int:
    """Any free port."""
    return choose(0)


def demand(port: int, option: str) -> int:
    """The port somebody asked for by name.

    Raises:
        ConfigError: it is taken; names the option.
    """
    if not is_free(port):
        raise ConfigError(
            f"{option} = {port} is taken on {LOOPBACK}; stop what listens there, choose another "
            "port, or leave the option out to get a free one"
        )
    return port
