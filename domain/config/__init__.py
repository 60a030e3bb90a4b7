"""The run configuration (TOML): read once, validated here.

Each key is documented once, where it is defined: `rollouts` has the tables `[tasks]`, `[groups]`,
`[schedule]`, `[sampling]` and `[budget]`, `training` the tables `[model]`, `[trainer]`,
`[checkpoint]`, `[engine]` and `[evaluation]`. Unknown keys are refused with a suggestion, and
settings that cannot hold together are refused with the reason (`domain.validity`).
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from domain.config.rollouts import BudgetSection, Groups, Sampling, Schedule, Tasks
from domain.config.section import NonNegative, Positive
from domain.config.section import Section as Section
from domain.config.training import Checkpoint, Engine
from domain.config.training import Evaluation as Evaluation
from domain.config.training import Lora as Lora
from domain.config.training import Model as Model
from domain.config.training import TinyModel as TinyModel
from domain.config.training import Trainer as Trainer
from domain.errors import ConfigError
from domain.validity import conflicts, explain

OWN_LOOP = "own-loop"
"""`tasks.dataset` of a run that a Python loop trains (`rollbook.RolloutScheduler`): its batches come
from that loop. `tasks.source` is the same where the source is an object of the loop's process."""


class RunConfig(Section):
    """One training job, complete. Serialised into the ledger at creation and never changed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    seed: NonNegative = 0
    steps: Positive | None = None
    """Steps to train; without it the run ends with the data (`tasks.epochs`)."""
    tasks: Tasks
    groups: Groups = Groups()
    schedule: Schedule = Schedule()
    sampling: Sampling = Sampling()
    budget: BudgetSection = BudgetSection()
    model: Model
    trainer: Trainer = Trainer()
    checkpoint: Checkpoint = Checkpoint()
    engine: Engine = Engine()
    evaluation: Evaluation | None = None
    root: str = "."
    """Folder of the configuration file: relative paths and imports start here. Set on loading."""

    @property
    def max_context_tokens(self) -> int:
        """Longest context of a rollout, in tokens."""
        return self.budget.max_context_tokens or self.trainer.width

    @property
    def admit(self) -> int:
        """Groups of a batch that are trained."""
        return self.groups.admit or self.tasks.batch_size

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of the environments that are sampled: of the mix, or the one."""
        return tuple(m.environment for m in self.tasks.mix) or (self.tasks.environment,)

    def of(self, environment: str) -> Self:
        """This job as one environment's worker sees it: with that environment alone.

        Raises:
            ConfigError: the mix has no such environment.
        """
        if not self.tasks.mix:
            return self
        for member in self.tasks.mix:
            if member.environment == environment:
                own = member.model_dump(exclude={"ratio", "in_flight"})
                tasks = self.tasks.model_copy(update=own | {"mix": ()})
                return self.model_copy(update={"tasks": tasks})
        raise ConfigError(
            f"run {self.name} has no environment {environment!r}; it has "
            f"{', '.join(self.environments)}"
        )

    def environment_of(self, task_id: str) -> str:
        """The environment of a task: in a mix, the first part of its id."""
        return task_id.partition("/")[0] if self.tasks.mix else self.tasks.environment

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        for refused, reason in conflicts(self):
            if refused:
                raise ValueError(reason)
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and validate a TOML file.

        Raises:
            ConfigError: names the key, the value and the remedy.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        return cls.parse(table | {"root": str(path.resolve().parent)}, origin=str(path))

    @classmethod
    def parse(cls, table: Mapping[str, Any], *, origin: str = "configuration") -> Self:
        """Validate a nested table; every problem is named in one message.

        Raises:
            ConfigError: names the keys, the values and the remedy.
        """
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            lines = [explain(cls, problem) for problem in error.errors()]
            raise ConfigError(f"{origin}: " + "; ".join(lines)) from error
