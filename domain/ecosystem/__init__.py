"""Environments of other packages, named in the configuration: `PACKAGE:NAME`.

    reasoning_gym:chain_sum    a data set of reasoning-gym, with its own scoring
    verifiers:ENV_ID           an installed environment of verifiers

Such a name is a source and a data set at once, and `args` are the package's own. The packages are
optional: one is imported when a configuration names it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from domain.ecosystem import reasoning_gym, verifiers
from domain.environments import Source
from domain.rollouts import Task

Args = Mapping[str, Any]


class Package(Protocol):
    """An adapter: what a name of the package stands for."""

    def source(self, name: str, args: Args, *, root: Path, key: str) -> Source:
        """What plays its tasks."""

    def tasks(self, name: str, args: Args, *, root: Path, key: str) -> Sequence[Task]:
        """The tasks, as JSON values."""


_PACKAGES: Mapping[str, Package] = {"reasoning_gym": reasoning_gym, "verifiers": verifiers}


def find(reference: str) -> tuple[Package, str] | None:
    """The adapter and the name that a reference means; None if it is of the user's own."""
    package, colon, name = reference.partition(":")
    if not colon or package not in _PACKAGES:
        return None
    return _PACKAGES[package], name
