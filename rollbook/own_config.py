"""The run configuration of a loop of one's own, from the scheduler's parameters.

It is the same `RunConfig` as a file's, with the same rules: what cannot hold together is refused
with the same words. What such a loop does by itself (its data, its optimizer) is not in it.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from domain.config import OWN_LOOP, RunConfig
from domain.environments import Source
from domain.errors import ConfigError
from domain.sources import resolve

_NAMED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")
_COMPARED_OTHERWISE = {"root", "tasks.source", "model.path"}
"""Where things lie may change between two processes; the model is compared by its content."""


@dataclass(frozen=True, kw_only=True)
class Located:
    """A source and where other processes find it."""

    source: Source
    reference: str | None
    """`module:name`; None: it exists in this process only."""
    root: Path
    """Folder that the module is imported from."""


def locate(source: Source | str) -> Located:
    """Find a source's `module:name`: as given, or where a module holds this very object.

    Raises:
        ConfigError: the name leads nowhere.
    """
    if isinstance(source, str):
        found = resolve(source, root=Path.cwd(), key="source")
        module = sys.modules[source.partition(":")[0]]
        value = found() if isinstance(found, type) or _is_function(found) else found
        return Located(source=value, reference=source, root=_root(module.__name__, module.__file__))
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in ("__main__", "__mp_main__") or file is None:
            continue
        for attribute, value in list(vars(module).items()):
            reference = f"{name}:{attribute}"
            if value is source and _NAMED.match(reference):
                return Located(source=source, reference=reference, root=_root(name, file))
    return Located(source=source, reference=None, root=Path.cwd())


def environment_of(run: str) -> str:
    """Task queue of a run's own rollout workers: nobody else can play its source."""
    slug = run.replace(".", "-")
    if slug == run and len(run) <= 36:
        return f"own-{run}"
    return f"own-{slug[:27]}-{sha256(run.encode()).hexdigest()[:8]}"


def build(
    run: str,
    located: Located,
    *,
    model: Path,
    batch_size: int,
    groups: Mapping[str, Any],
    schedule: Mapping[str, Any],
    trainer: Mapping[str, Any],
    sampling: Mapping[str, Any],
    budget: Mapping[str, Any],
    engine: Mapping[str, Any],
    dtype: str,
    seed: int,
) -> RunConfig:
    """The configuration, validated.

    Raises:
        ConfigError: names the key, the value and the remedy.
    """
    return RunConfig.parse(
        {
            "name": run,
            "seed": seed,
            "root": str(located.root),
            "tasks": {
                "source": located.reference or OWN_LOOP,
                "dataset": OWN_LOOP,
                "batch_size": batch_size,
                "environment": environment_of(run),
                "epochs": 1,
                "shuffle": False,
            },
            "groups": groups,
            "schedule": {"order": "dataset", "stale_policy": "resubmit", **schedule},
            "sampling": sampling,
            "budget": budget,
            "model": {"path": str(model.resolve()), "dtype": dtype},
            "trainer": {"overflow": "cut", **trainer},
            "engine": engine,
        },
        origin=f"RolloutScheduler(run={run!r})",
    )


def check_unchanged(recorded: RunConfig, now: RunConfig) -> None:
    """Refuse to go on with a run under other settings.

    Raises:
        ConfigError: names what differs.
    """
    if recorded.tasks.dataset != OWN_LOOP:
        raise ConfigError(
            f"run {recorded.name!r} was made from a configuration file; `rollbook resume "
            f"{recorded.name}` goes on with it, a loop of your own needs another run name"
        )
    before, after = _flat(recorded.model_dump()), _flat(now.model_dump())
    differing = [
        f"{key} = {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key not in _COMPARED_OTHERWISE and before.get(key) != after.get(key)
    ]
    if differing:
        raise ConfigError(
            f"run {recorded.name!r} was created with {'; '.join(differing)}. A run keeps its "
            "settings: restore them, or choose another run name"
        )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _root(module: str, file: str | None) -> Path:
    """The folder on `sys.path` that a module was imported from."""
    if file is None:
        return Path.cwd()
    path = Path(file).resolve()
    package = path.name == "__init__.py"
    return path.parents[module.count(".") + package]


def _is_function(value: object) -> bool:
    return callable(value) and hasattr(value, "__code__")
