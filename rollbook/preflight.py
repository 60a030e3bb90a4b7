"""Everything that can be wrong with a run is found here, before anything is started or written."""

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from activities.chat import Chat
from activities.play import rehearse
from domain import sources
from domain.capabilities import BUILT_IN, missing, of_vllm
from domain.config import RunConfig
from domain.data import TaskStream
from domain.environments import Source
from domain.errors import ConfigError, RollbookError
from domain.mixing import MixedStream
from domain.services import vllm_python
from engine.vllm.command import is_cpu_build
from storage import datasets
from trainer import folders

T = TypeVar("T")
Batches = TaskStream | MixedStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run will do, for the first line that people see."""

    tasks: int
    batches: int | None
    """None: the data repeats until the step target."""


def check(config: RunConfig, *, own_engine: bool = False) -> Plan:
    """Load the source, the data and the model's description, as the run will.

    Args:
        config: of the run.
        own_engine: the engine of `[engine]` will sample; other engines are asked what
            they can do before they load the first version.

    Raises:
        ConfigError: names the thing, the value and the remedy.
    """
    check_engine(config, own=own_engine)
    for name in config.environments:
        _check_environment(config.of(name))
    stream = datasets.open_stream(config)
    if (e := config.evaluation) is not None:
        key, root = datasets.HELD_OUT, Path(config.root)
        _imported(
            key, e.dataset, lambda: datasets.read_tasks(e.dataset, e.args, root=root, key=key)
        )
    return Plan(tasks=len(stream.tasks), batches=stream.batches)


def _check_environment(alone: RunConfig) -> None:
    t = alone.tasks
    source = _imported(sources.SOURCE, t.source, lambda: sources.load(alone))
    stream = _imported("tasks.dataset", t.dataset or t.source, lambda: datasets.open_stream(alone))
    check_parts(alone, source, stream)


def check_engine(config: RunConfig, *, own: bool) -> None:
    """Refuse a run that the engine of `[engine]`, if it is to sample, cannot serve.

    Raises:
        ConfigError: names what is missing and the remedy.
    """
    if not own:
        return
    e, adapters = config.engine, config.model.lora is not None
    name, resident = "the built-in engine", e.max_resident
    has: tuple[str, ...] = BUILT_IN
    if e.kind == "vllm":
        python = vllm_python(os.environ)
        if python is None:
            raise ConfigError(
                'engine.kind = "vllm" needs ROLLBOOK_VLLM_PYTHON, the interpreter of an environment '
                "that has vLLM (`make vllm` builds one for CPUs)"
            )
        name, resident = "vLLM", e.max_resident if adapters else 1
        has = of_vllm(
            adapters=adapters,
            kept_sets=not is_cpu_build(python),
            images=bool(config.budget.max_images),
        )
    if lacks := missing(config, max_resident=resident, capabilities=has):
        raise ConfigError(f"{name} cannot sample for this run: {'; '.join(lacks)}")


def check_parts(config: RunConfig, source: Source, stream: Batches) -> None:
    """Try the model's description on the source and the first batch.

    Raises:
        ConfigError: names the thing, the value and the remedy.
    """
    if config.budget.max_images:
        raise ConfigError(
            f"budget.max_images = {config.budget.max_images}: the models that rollbook trains read "
            "tokens only, and would score the tokens of an image without having seen it; train with "
            "a loop and a model of your own (rollbook.RolloutScheduler), or leave it out"
        )
    if not stream.batch(0):
        raise ConfigError(f"tasks.dataset = {config.tasks.dataset!r} holds no task")
    with tempfile.TemporaryDirectory() as scratch:
        folder = folders.source_folder(config, Path(scratch))
        folders.description_files(folder, config.model.dtype)
        folders.check_context(folder, config)
        chat = Chat.open(folder, renderer=config.model.renderer)
        rehearse(source, stream.batch(0), config=config, chat=chat)


def _imported(key: str, reference: str, load: Callable[[], T]) -> T:
    """What the user's own module gives; where that raises, says at which line."""
    try:
        return load()
    except RollbookError:
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        raise ConfigError(
            f"{key} = {reference!r} raises {type(error).__name__}: {error} ({last.filename}, line "
            f"{last.lineno}); mend that module"
        ) from error
