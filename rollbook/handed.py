"""The step that a loop of one's own is computing, from the rows it got until it says what they made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from domain.errors import LedgerError
from rollbook import publishing
from rollbook.objective import State
from rollbook.publishers import Publisher
from storage.plans import Planned
from trainer.booking import Done


@dataclass(frozen=True)
class Handed:
    """A step that was handed out and not applied."""

    plan: Planned
    replayed: bool
    cause: str | None
    """Why it can make no update, if it cannot."""
    metrics: Mapping[str, float]
    state: State

    @classmethod
    def of(
        cls,
        plan: Planned,
        rows: Mapping[str, Any],
        *,
        replayed: bool,
        metrics: Mapping[str, float],
        state: State,
    ) -> Self:
        """A plan with its packed rows."""
        return cls(plan, replayed, _no_update(plan, rows), metrics, state)

    def version(self, updated: bool) -> int:
        """The version after it."""
        return self.plan.version_before + updated

    def done(
        self,
        run: str,
        publisher: Publisher,
        state: State | None,
        *,
        updated: bool,
        digest: bytes | None,
        metrics: Mapping[str, float],
    ) -> Done:
        """What is booked of it; see `RolloutScheduler.applied`.

        Raises:
            LedgerError: `updates` of the state after the step does not fit.
        """
        after = self.state if state is None else state
        version = self.version(updated)
        if after.updates != version:
            raise LedgerError(
                f"applied(updated={updated}) of step {self.plan.step}, but state.updates is "
                f"{after.updates}, not {version}; count the update in the state first, or pass the "
                "new one: applied(state=…)"
            )
        return Done(
            updated=updated,
            weights_sha256=publishing.digest_of(run, publisher, after.weights, version, digest),
            cause=None if updated else self.cause or "left_out",
            optimizer_updates=int(updated),
            metrics=dict(self.metrics) | dict(metrics),
        )


def _no_update(plan: Planned, rows: Mapping[str, Any]) -> str | None:
    if not plan.rows:
        return "empty"
    mask = rows["response_mask"]
    return None if (rows["advantages"][mask] != 0).any() else "no_usable_gradient"
