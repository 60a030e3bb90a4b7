"""The rollouts of a planned step as packed rows, with the figures of what is in them.

What the built-in trainer and a loop of one's own see alike before any network does: a function of
the rollouts and the configuration, so that a plan that is read again gives the same arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from domain.config import RunConfig
from domain.errors import LedgerError
from domain.rollouts import Rollout
from storage import records
from storage.database import Ledger
from storage.plans import Planned
from trainer import metrics as figures
from trainer.consumer import Consumer
from trainer.members import Pool
from trainer.packing import Packed, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on."""

    groups: Sequence[Sequence[Rollout]]
    """Members of each planned part, in plan order."""
    latencies: Sequence[float] = ()
    """Seconds from submission to finish of the rollouts."""
    cancelled_tokens: Sequence[int] = ()
    """Sampled ids of the rollouts cancelled in these groups' favour."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All members, in plan order."""
        return [rollout for group in self.groups for rollout in group]

    def pool(self, config: RunConfig) -> Pool:
        """What these groups add to what `batch` compares with.

        Raises:
            LedgerError: a rollout that cannot be scored; it is named.
        """
        try:
            members = figures.judged(self.rollouts, config.trainer)
        except ValueError as error:
            raise LedgerError(f"the rollouts of this step cannot be trained: {error}") from error
        return Pool.of(members)

    def pack(self, config: RunConfig, version: int, *, pool: Pool | None = None) -> Packed:
        """The rows, trained at `version`; `pool` is what all processes together have to compare with.

        Raises:
            LedgerError: a rollout that cannot be packed, scored or be this old; it is named.
        """
        t, schedule = config.trainer, config.schedule
        try:
            return pack(
                self.rollouts,
                t.width,
                rows=t.rows if t.overflow == "cut" else None,
                estimator=t.estimator,
                truncation=t.truncation,
                truncation_by_cause=t.truncation_by_cause,
                support_capacity=t.support_capacity,
                support_grows=True,  # ties decide how many ids an engine keeps; they stop no run
                standardize=t.standardize,
                overlong=t.overlong,
                pool=pool,
                trainer_version=version,
                max_lag=schedule.max_lag,
                stale_policy=schedule.stale_policy,
            )
        except ValueError as error:
            raise LedgerError(f"the rollouts of this step cannot be trained: {error}") from error

    def figures(self, config: RunConfig, packed: Packed, version: int) -> dict[str, float]:
        """What `trainer.metrics` tells of them; nothing when there are none."""
        if not self.groups:
            return {}
        return figures.of_batch(
            self.rollouts,
            packed,
            config.trainer,
            version,
            latencies=self.latencies,
            cancelled_tokens=self.cancelled_tokens,
        ) | figures.by_environment(self.rollouts, config)

    def weights(self, config: RunConfig, packed: Packed) -> dict[str, float]:
        """How much each kind of figure of this rank counts among those of all ranks."""
        return figures.weights(self.rollouts, packed, config.trainer)


def read(ledger: Ledger, consumer: Consumer, plan: Planned) -> Batch:
    """The rollouts of a plan."""
    return Batch(
        groups=consumer.read(plan),
        latencies=ledger.call(records.latencies, consumer.run, plan.step),
        cancelled_tokens=ledger.call(records.cancelled_tokens, consumer.run, plan.step),
    )
