"""Where the groups of a step come from: hand-over and plan at every poll, then their tokens.

Hand-over belongs to every poll, not to every step: a group that ends without a batch frees its
place at once, and the run would otherwise hang with too few groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from domain import failpoints
from domain.errors import PlatformAway
from domain.rollouts import Rollout, Task
from storage import outages, segments, steps, tasks
from storage.database import Ledger, Tx
from storage.steps import Planned
from storage.tasks import HandedOver
from trainer.waiting import Kind, Waits

IDLE_S = 15.0
LOOK_EVERY_S = 5.0
"""Seconds between two looks at what has moved, once a wait is longer than an outage may be."""


@dataclass(frozen=True)
class End:
    """Nothing is left to train."""

    reason: str


class Stream(Protocol):
    """A run's data: `domain.data.TaskStream`, or `trainer.feed.Feed` in a loop of one's own."""

    def batch(self, index: int) -> Sequence[Task] | None:
        """The tasks of a batch; none beyond the end; None while it is not known yet."""

    def position(self, batch: int) -> dict[str, Any]:
        """Where the data stands before that batch."""

    def verify(self, position: Mapping[str, Any]) -> None:
        """Refuse other data than `position` was taken of."""


@dataclass
class Consumer:
    """One share of a run's data, seen from the trainer."""

    ledger: Ledger
    run: str
    epoch: int
    stream: Stream
    waits: Waits
    share: int = 0

    def position(self) -> dict[str, Any]:
        """Where the next batch to draw begins."""
        drawn, _ = self.ledger.call(tasks.progress, self.run, self.share)
        return self.stream.position(drawn)

    def verify_data(self, position: Mapping[str, Any]) -> None:
        """Check that the data is what the run has drawn so far.

        Raises:
            DataChanged: another data set, order or seed, or a batch with other content.
        """
        self.stream.verify(position)
        drawn, _ = self.ledger.call(tasks.progress, self.run, self.share)
        for batch in range(int(position["batch"]), drawn):
            self._register(batch)

    def next_plan(self, step: int, *, idle: Callable[[], None] = lambda: None) -> Planned | End:
        """Hand over and plan until the step has its groups.

        Args:
            step: the next step.
            idle: called once in a long wait, when time costs nothing.

        Raises:
            Stopped: the process was asked to stop meanwhile.
            Fenced: another trainer has taken over.
            RunStopped, SourceBroken: the run was ended from outside.
            PlatformAway: what the run waits for has not moved for longer than it may.
        """
        idled, looked = False, 0.0
        while True:
            self.waits.check()
            self.hand_over()
            failpoints.reach("plan_start")
            answer = self.ledger.call(self._plan, step)
            if isinstance(answer, Planned):
                self.waits.over()
                failpoints.reach("plan_done")
                return answer
            if answer.kind == "end":
                self.waits.over()
                return End(answer.reason)
            kind: Kind = "groups" if answer.kind == "wait" else answer.kind
            waited = self.waits.pause(kind, answer.reason)
            if waited > IDLE_S and not idled:
                idled = True
                idle()
            late = waited > max(looked + LOOK_EVERY_S, self.waits.patience_s)
            if late and kind != "paused":
                looked = waited
                self._refuse_outage(step)

    def _refuse_outage(self, step: int) -> None:
        limit = self.waits.patience_s
        away = self.ledger.call(outages.find, self.run, limit_s=limit)
        if away is not None:
            raise PlatformAway(
                f"step {step} waits for rollouts and nothing has moved for {limit:g} s "
                f"(schedule.max_outage): {away}. `rollbook stuck {self.run}` looks closer; mend it, "
                f"then `rollbook resume {self.run}`"
            )

    def hand_over(self) -> None:
        """Register what is needed and submit what may be."""
        while True:
            handed = self.ledger.call(self._hand_over)
            if handed.submitted:
                failpoints.reach("h_done")
            if handed.need_batch is None or not self._register(handed.need_batch):
                return

    def read(self, plan: Planned) -> list[list[Rollout]]:
        """The rollouts of the planned parts, in plan order."""
        rows = [(row.group, row.part) for row in plan.rows]
        return self.ledger.call(segments.members, self.run, rows) if rows else []

    def _register(self, batch: int) -> bool:
        """Record a batch, or the end of the data; False: it is not known yet."""
        drawn = self.stream.batch(batch)
        if drawn is None:
            return False
        if drawn:
            after = self.stream.position(batch + 1)
            self.ledger.call(
                tasks.register_batch, self.run, self.epoch, self.share, batch, drawn, after
            )
        else:
            self.ledger.call(tasks.end_of_data, self.run, self.epoch, self.share, batch)
        return True

    def _hand_over(self, tx: Tx) -> HandedOver:
        handed = tasks.hand_over(tx, self.run, self.epoch, self.share)
        if handed.submitted:
            failpoints.reach("h_mid")
        return handed

    def _plan(self, tx: Tx, step: int) -> Planned | steps.Waiting:
        answer = steps.plan(tx, self.run, self.epoch, self.share, step)
        if isinstance(answer, Planned) and not answer.replayed:
            failpoints.reach("plan_mid")
        return answer
