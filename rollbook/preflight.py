"""Everything that can be wrong with a run is found here, before anything is started or written."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from activities.chat import Chat
from activities.play import rehearse
from domain import sources
from domain.capabilities import BUILT_IN, missing
from domain.config import RunConfig
from domain.data import TaskStream
from domain.environments import Source
from domain.errors import ConfigError
from storage import datasets
from trainer import folders


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
        own_engine: the built-in engine of `[engine]` will sample; other engines are asked what
            they can do before they load the first version.

    Raises:
        ConfigError: names the thing, the value and the remedy.
    """
    check_engine(config, own=own_engine)
    source = sources.load(config)
    stream = datasets.open_stream(config)
    check_parts(config, source, stream)
    if config.evaluation is not None:
        datasets.read_tasks(config.evaluation.dataset, root=Path(config.root))
    return Plan(tasks=len(stream.tasks), batches=stream.batches)


def check_engine(config: RunConfig, *, own: bool) -> None:
    """Refuse a run that the built-in engine of `[engine]`, if it is to sample, cannot serve.

    Raises:
        ConfigError: names what is missing and the remedy.
    """
    lacks = missing(config, max_resident=config.engine.max_resident, capabilities=BUILT_IN)
    if own and lacks:
        raise ConfigError(f"the built-in engine cannot sample for this run: {'; '.join(lacks)}")


def check_parts(config: RunConfig, source: Source, stream: TaskStream) -> None:
    """Try the model's description on the source and the first batch.

    Raises:
        ConfigError: names the thing, the value and the remedy.
    """
    if not stream.batch(0):
        raise ConfigError(f"tasks.dataset = {config.tasks.dataset!r} holds no task")
    with tempfile.TemporaryDirectory() as scratch:
        folder = folders.source_folder(config, Path(scratch))
        folders.description_files(folder, config.model.dtype)
        folders.check_context(folder, config)
        chat = Chat.open(folder, renderer=config.model.renderer)
        rehearse(source, stream.batch(0), config=config, chat=chat)
