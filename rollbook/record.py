"""The step record of a loop of one's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from trainer.booking import Booked


@dataclass(frozen=True, kw_only=True)
class SchedulerRecord:
    """One step, as `step_shares.record` and `steps.metrics` have it too."""

    updates: int
    """Policy version after it."""
    version: int | None
    """Oldest version among the admitted groups; None for an empty step."""
    lag: int
    """Trainer version minus that one."""
    groups: int
    """Admitted groups."""
    resubmitted: Mapping[str, int]
    """By cause: infra_error, cancelled, stale, timeout, unscored. Since the last record, as these:"""
    cancelled: int
    abandoned: int
    cut: int
    waited: float
    """Seconds that the loop waited."""
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, booked: Booked) -> Self:
        """The record of a step that was booked."""
        names = (
            *("updates", "version", "lag", "groups", "resubmitted", "cancelled", "abandoned"),
            *("cut", "waited"),
        )
        told = {name: booked.record[name] for name in names}
        return cls(**told, metrics=booked.metrics)
