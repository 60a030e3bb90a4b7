"""Load the source that a configuration names, and check that it and the settings belong together."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from domain import ecosystem
from domain.config import RunConfig
from domain.environments import (
    Env,
    HarnessSource,
    PromptSource,
    SessionSource,
    Source,
    samples_at_gateway,
)
from domain.errors import ConfigError
from domain.tools import Tool

SOURCE = "tasks.source"
_HOOKS = ("reset", "on_turn", "reward", "on_truncated", "snapshot", "restore", "close")


def load(config: RunConfig) -> Source:
    """The source of `tasks.source`, checked. Of a mix, load `config.of(environment)`.

    Raises:
        ConfigError: it cannot be imported, is no source, or contradicts the configuration.
    """
    tasks, root = config.tasks, Path(config.root)
    if (found := ecosystem.find(tasks.source)) is not None:
        package, name = found
        source = package.source(name, tasks.args, root=root, key=SOURCE)
    else:
        source = made(
            resolve(tasks.source, root=root, key=SOURCE), tasks.args, key=SOURCE, name=tasks.source
        )
    check(source, config)
    return source


def load_all(config: RunConfig) -> dict[str, Source]:
    """The source of each environment, by name.

    Raises:
        ConfigError: as `load`.
    """
    return {name: load(config.of(name)) for name in config.environments}


def made(value: Any, args: Mapping[str, Any], *, key: str, name: str) -> Any:
    """What a class or function makes of `args`; anything else is taken as it is.

    Raises:
        ConfigError: it does not take them.
    """
    if not (inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, partial)):
        if args:
            raise ConfigError(f"{key} = {name!r} is no class or function, so it takes no args")
        return value
    try:
        inspect.signature(value).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{key} = {name!r} does not take args {dict(args)}: {error}") from error
    return value(**args)


def resolve(reference: str, *, root: Path, key: str) -> Any:
    """The object that `module:name` names; modules beside the configuration come first.

    Raises:
        ConfigError: names the key, the reference and what is missing.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{key} = {reference!r} is not of the form module:name")
    folder = str(root.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        value: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module's own absence is about the key; what it imports is another problem.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{key} = {reference!r}: no module {module_name!r}, neither in {folder} nor installed"
        ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{key} = {reference!r}: module {module_name!r} has no {name!r}")
        value = getattr(value, part)
    return value


def check(source: object, config: RunConfig) -> None:
    """Refuse an object that is no source, or settings that it cannot serve.

    Raises:
        ConfigError: names the source, the setting and the remedy.
    """
    name = type(source).__name__
    if samples_at_gateway(source):
        _check_gateway(name, config)
    if isinstance(source, HarnessSource):
        _check_harness(source, config)
        return
    if isinstance(source, PromptSource):
        if not callable(source.reward):
            raise ConfigError(f"PromptSource's reward is {source.reward!r}, which is no function")
        return
    if isinstance(source, Env):
        _check_env(source, config)
        return
    if not isinstance(source, SessionSource):
        raise ConfigError(
            f"tasks.source gives a {name}; it must be an Env, a PromptSource or an object with "
            "`async def run(task, recorder)`"
        )
    if not inspect.iscoroutinefunction(source.run):
        raise ConfigError(f"{name}.run must be an async function")


def _check_gateway(name: str, config: RunConfig) -> None:
    if config.budget.final_answer_reserve:
        raise ConfigError(
            f"budget.final_answer_reserve = {config.budget.final_answer_reserve}: a program that "
            f"samples through the gateway cannot be told to answer now ({name}); set it to 0"
        )


def _check_harness(source: HarnessSource, config: RunConfig) -> None:
    commands: list[tuple[str, Sequence[object]]] = [("command", source.command)]
    if not callable(source.verify):
        commands.append(("verify", tuple(source.verify)))
    for what, words in commands:
        if not words or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"HarnessSource.{what} is {words!r}; it must be a list of words")
    if source.workdir is not None and not (Path(config.root) / source.workdir).is_dir():
        raise ConfigError(
            f"HarnessSource.workdir = {source.workdir!r}: there is no such folder in {config.root}"
        )


def _check_env(env: Env, config: RunConfig) -> None:
    name = type(env).__name__
    for hook in _HOOKS:
        if not inspect.iscoroutinefunction(getattr(env, hook)):
            raise ConfigError(f"{name}.{hook} must be an async function")
    needed = {"snapshot": ("snapshot", "restore")}.get(env.recovery, ())
    if env.recovery not in ("drop", "stateless", "snapshot"):
        raise ConfigError(
            f'{name}.recovery = {env.recovery!r}; it is "drop", "stateless" or "snapshot"'
        )
    missing = [hook for hook in ("reset", "reward", *needed) if not _overrides(env, hook)]
    if missing:
        raise ConfigError(f"{name} must implement {', '.join(missing)}")
    entries: Sequence[object] = env.tools
    wrong = [entry for entry in entries if not isinstance(entry, Tool)]
    if wrong:
        raise ConfigError(f"{name}.tools holds {wrong[0]!r}; decorate it with @tool")
    names = [entry.name for entry in env.tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"{name}.tools has two tools of one name: {sorted(names)}")
    policies = {config.trainer.truncation, *config.trainer.truncation_by_cause.values()}
    judged = sorted(policies & {"score", "drop"})
    if judged and not _overrides(env, "on_truncated"):
        raise ConfigError(
            f'trainer.truncation "{judged[0]}" needs a verdict on truncated rollouts: implement '
            f'{name}.on_truncated, or use "mask" or "zero"'
        )


def _overrides(env: Env, hook: str) -> bool:
    return getattr(type(env), hook) is not getattr(Env, hook)
