"""Read the data set that a configuration names: a JSONL file, or a Python object."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from domain import ecosystem
from domain.config import OWN_LOOP, RunConfig
from domain.data import TaskStream, as_tasks
from domain.errors import ConfigError
from domain.mixing import MixedStream, Part
from domain.rollouts import Task
from domain.sources import made, resolve

HELD_OUT = "evaluation.dataset"


def open_stream(config: RunConfig) -> TaskStream | MixedStream:
    """The tasks of `[tasks]`: one data set's, or those of a mix.

    Raises:
        ConfigError: the data cannot be read; names the file and the row.
    """
    if config.tasks.mix:
        parts = [
            Part(m.environment, m.ratio, _stream(config.of(m.environment)))
            for m in config.tasks.mix
        ]
        return MixedStream(parts=parts, batch_size=config.tasks.batch_size)
    return _stream(config)


def _stream(config: RunConfig) -> TaskStream:
    t = config.tasks
    return TaskStream(
        tasks=read_tasks(
            t.dataset or t.source, t.args if not t.dataset else {}, root=Path(config.root)
        ),
        batch_size=t.batch_size,
        epochs=t.epochs,
        seed=config.seed,
        shuffle=t.shuffle,
    )


def refuse_own_loop(config: RunConfig) -> None:
    """Refuse a run whose batches come from a Python loop: nobody else can train it.

    Raises:
        ConfigError: says how it goes on.
    """
    if config.tasks.dataset == OWN_LOOP:
        raise ConfigError(
            f"run {config.name!r} is trained by a Python loop (RolloutScheduler, AsyncTrainer); start "
            "that program again, it goes on by itself"
        )


def read_tasks(
    dataset: str,
    args: Mapping[str, Any] | None = None,
    *,
    root: Path,
    key: str = "tasks.dataset",
) -> list[Task]:
    """The tasks of a JSONL file, of `module:name` or of a package's environment, in order.

    Args:
        dataset: the file, the object or the environment.
        args: what the function or the environment is made with.
        root: folder in which both are looked for first.
        key: of the configuration, for messages.

    Raises:
        ConfigError: names the file or object, the row and what is wrong with it.
    """
    args = args or {}
    if (found := ecosystem.find(dataset)) is not None:
        package, name = found
        rows = package.tasks(name, args, root=root, key=key)
        return as_tasks(enumerate(rows), origin=dataset)
    if dataset.endswith((".jsonl", ".ndjson")):
        return _read_jsonl(root / dataset, key)
    if ":" not in dataset:
        raise ConfigError(
            f"{key} = {dataset!r} is neither a .jsonl file nor of the form module:name"
        )
    value = made(resolve(dataset, root=root, key=key), args, key=key, name=dataset)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(
            f"{key} = {dataset!r} is a {type(value).__name__}; it must be a sequence of "
            "tasks, or a function that returns one"
        )
    return as_tasks(enumerate(value), origin=dataset)


def _read_jsonl(path: Path, key: str) -> list[Task]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read data set {path}: {error.strerror}; paths are relative to the "
            "configuration file"
        ) from error
    # Bytes are split on newlines alone: splitlines() on text would also split on U+2028, which
    # JSON strings may hold. An empty line keeps its number and makes no task.
    lines = enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
    rows = ((n, _parse(line, f"{path}, line {n}")) for n, line in lines if line.strip())
    return as_tasks(rows, origin=str(path), word="line")


def _parse(line: bytes, where: str) -> object:
    try:
        value: object = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
