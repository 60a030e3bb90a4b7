"""Copies step records from the ledger to other people's tools.

A sink follows the ledger, not the trainer: what crashed and was recomputed is one record there, so it
is one record in each copy, and a copy that was interrupted goes on behind its last step.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from domain.config import RunConfig
from domain.errors import ConfigError
from storage import reports
from storage.database import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One applied step."""

    run: str
    step: int
    version: int
    at: datetime
    seconds: float
    groups: int
    figures: Mapping[str, float]


class Sink(Protocol):
    """Somewhere to copy to."""

    def last(self) -> int | None:
        """The last step that is there already."""

    def write(self, record: Record) -> None:
        """Add one step; steps come in order."""

    def close(self) -> None:
        """Flush what is buffered."""


def open_sink(target: str, config: RunConfig) -> Sink:
    """A sink from `kind:where`.

    Raises:
        ConfigError: unknown kind, or its package is not installed.
    """
    kind, _, where = target.partition(":")
    make = KINDS.get(kind)
    if make is None or not where:
        raise ConfigError(
            f"{target!r} is no sink; use one of {', '.join(f'{kind}:WHERE' for kind in KINDS)}"
        )
    try:
        return make(where, config)
    except ImportError as error:
        raise ConfigError(
            f"the sink {kind} needs a package that is not installed ({error.name}); "
            f"pip install 'rollbook[{kind}]'"
        ) from error


def copy(ledger: Ledger, run: str, sink: Sink, *, after: int | None) -> int | None:
    """Copy the steps behind `after`; the last step that is there now."""
    for row in ledger.call(reports.steps, run, after=-1 if after is None else after):
        figures = {
            name: float(value)
            for name, value in (row["metrics"] or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        sink.write(
            Record(
                run=run,
                step=row["step"],
                version=row["version"],
                at=row["applied_at"],
                seconds=row["seconds"],
                groups=row["groups"],
                figures=figures,
            )
        )
        after = row["step"]
    return after


class Jsonl:
    """One JSON object a line. A line that a crash tore is dropped and written again."""

    def __init__(self, where: str, config: RunConfig) -> None:
        path = Path(where)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._file.seek(0)
        whole = self._file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        steps = [json.loads(line) for line in whole.splitlines()]
        self._last = max((s["step"] for s in steps if s["run"] == config.name), default=None)

    def last(self) -> int | None:
        return self._last

    def write(self, record: Record) -> None:
        line = {
            "run": record.run,
            "step": record.step,
            "version": record.version,
            "at": record.at.isoformat(),
            "seconds": record.seconds,
            "groups": record.groups,
            **record.figures,
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """An event file in a folder of the run's own."""

    def __init__(self, where: str, config: RunConfig) -> None:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(where) / config.name
        files = sorted(folder.glob("events.out.tfevents.*"))
        steps = [
            event.step
            for path in files
            for event in EventFileLoader(str(path)).Load()
            if event.HasField("summary")
        ]
        self._last = max(steps, default=None)
        self._writer = EventFileWriter(str(folder))

    def last(self) -> int | None:
        return self._last

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in record.figures.items()
        ]
        self._writer.add_event(
            Event(wall_time=record.at.timestamp(), step=record.step, summary=Summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of the same name in a Weights & Biases project; `WANDB_MODE=offline` works."""

    def __init__(self, where: str, config: RunConfig) -> None:
        import wandb

        self._run = wandb.init(
            project=where,
            id=config.name,
            name=config.name,
            resume="allow",
            config=config.model_dump(mode="json", exclude={"root"}),
        )

    def last(self) -> int | None:
        """Resumed online, it knows its step; what is written twice it ignores itself."""
        step = int(self._run.step)
        return step - 1 if step else None

    def write(self, record: Record) -> None:
        self._run.log(dict(record.figures), step=record.step)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run in the experiment `rollbook` of an MLflow tracking server or folder."""

    EXPERIMENT = "rollbook"
    _LAST = "rollbook.last_step"

    def __init__(self, where: str, config: RunConfig) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=where)
        experiment = self._client.get_experiment_by_name(self.EXPERIMENT)
        number = (
            self._client.create_experiment(self.EXPERIMENT)
            if experiment is None
            else experiment.experiment_id
        )
        found = self._client.search_runs([number], f"tags.`rollbook.run` = '{config.name}'")
        run = found[0] if found else None
        if run is None:
            run = self._client.create_run(
                number, run_name=config.name, tags={"rollbook.run": config.name}
            )
        self._id = run.info.run_id
        said = run.data.tags.get(self._LAST)
        self._last = None if said is None else int(said)

    def last(self) -> int | None:
        return self._last

    def write(self, record: Record) -> None:
        from mlflow.entities import Metric, RunTag

        at = int(record.at.timestamp() * 1000)
        metrics = [Metric(_name(n), v, at, record.step) for n, v in record.figures.items()]
        self._client.log_batch(
            self._id, metrics=metrics, tags=[RunTag(self._LAST, str(record.step))]
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _name(name: str) -> str:
    """As MLflow allows it."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


KINDS: dict[str, Callable[[str, RunConfig], Sink]] = {
    "jsonl": Jsonl,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
}
