"""Where the groups of a step come from: hand-over and plan at every poll, then their tokens.

Each rank has a share of the data, of which it registers, submits and plans its own groups. Where
several ranks read one share the first does so, and the others read its plan from the ledger. The
ranks poll in step: a step goes on when every share has planned it, and the run ends when every
share says so. A share that holds, waits or fails thereby holds, delays or fails the step for all.

Hand-over belongs to every poll, not to every step: a group that ends without a batch frees its
place at once, and the run would otherwise hang with too few groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from domain import failpoints, tracing
from domain.errors import Fenced, PlatformAway, RollbookError, RunStopped, SourceBroken
from domain.rollouts import Rollout, Task
from domain.shares import Share
from storage import outages, outbox, plans, segments, tasks
from storage.database import Ledger, Tx
from storage.plans import Planned, Waiting
from storage.tasks import HandedOver
from trainer.ranks import Ranks
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
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def share(self) -> int:
        """Which part of the data is this rank's."""
        return self.ranks.share

    def position(self) -> dict[str, Any]:
        """Where the next batch to draw begins; no share has drawn less."""
        drawn = min(
            self.ledger.call(tasks.progress, self.run, share)[0]
            for share in range(self.ranks.shares)
        )
        return self.stream.position(drawn)

    def verify_data(self, position: Mapping[str, Any]) -> None:
        """Check that the data is what the run has drawn so far.

        Where other ranks took the run over, some of which had drawn more than others, the batches
        that none of them had drawn are drawn now.

        Raises:
            DataChanged: another data set, order or seed, or a batch with other content.
        """
        self.stream.verify(position)
        if self.ranks.reader != 0:
            return
        drawn, _ = self.ledger.call(tasks.progress, self.run, self.share)
        first = int(position["batch"])
        if isinstance(self.stream, Share):
            first = self.stream.division.first(self.share, first)
        for batch in range(first, drawn):
            self._register(batch)

    def next_plan(self, step: int, *, idle: Callable[[], None] = lambda: None) -> Planned | End:
        """Hand over and plan until the step has its groups.

        Groups that are submitted here continue this trace; the current span is linked to the ones
        that submitted what the step trains.

        Args:
            step: the next step.
            idle: called once in a long wait, when time costs nothing; by all ranks at once.

        Raises:
            Stopped: the process was asked to stop meanwhile.
            Fenced: another trainer has taken over.
            RunStopped, SourceBroken: the run was ended from outside.
            PlatformAway: what the run waits for has not moved for longer than it may.
        """
        with tracing.span("plan", run=self.run, step=step):
            answer = self._planned(step, idle)
        if tracing.is_on() and isinstance(answer, Planned):
            groups = sorted({row.group for row in answer.rows})
            tracing.link(self.ledger.call(outbox.traceparents, self.run, groups))
        return answer

    def _planned(self, step: int, idle: Callable[[], None]) -> Planned | End:
        idled, looked = False, 0.0
        while True:
            answer = self.ranks.together("plan", lambda: self._poll(step))
            votes = self.ranks.of_shares(self.ranks.exchange("vote", _vote(answer)))
            missing = [vote for vote in votes if vote[0] != "planned"]
            if not missing:
                self.waits.over()
                failpoints.reach("plan_done")
                return self.ranks.together("read plan", partial(self._settled, step, answer))
            if all(kind == "end" for kind, _ in votes):
                self.waits.over()
                return End(votes[0][1])
            kind, reason = _waits_for(missing)
            waited = self.ranks.pause(self.waits, kind, reason)
            if waited > IDLE_S and not idled:
                idled = True
                idle()
            late = waited > max(looked + LOOK_EVERY_S, self.waits.patience_s)
            if late and kind != "paused":
                looked = waited
                self.ranks.together("outage", partial(self._refuse_outage, step))

    def _refuse_outage(self, step: int) -> None:
        limit = self.waits.patience_s
        away = self.ledger.call(outages.find, self.run, limit_s=limit)
        if away is not None:
            raise PlatformAway(
                f"step {step} waits for rollouts and nothing has moved for {limit:g} s "
                f"(schedule.max_outage): {away}. `rollbook stuck {self.run}` looks closer; mend it, "
                f"then `rollbook resume {self.run}`"
            )

    def _settled(self, step: int, answer: Planned | Waiting | None) -> Planned:
        """The share's plan: what its first reader was answered, what the others read."""
        plan = answer
        if answer is None:
            plan = self.ledger.call(plans.read, self.run, step, self.share)
        assert isinstance(plan, Planned)
        return plan

    def _poll(self, step: int) -> Planned | Waiting | None:
        """Hand over and ask for the plan, once; why that failed is kept where others see it."""
        self.waits.check()
        if self.ranks.reader != 0:
            return None
        try:
            self.hand_over()
            failpoints.reach("plan_start")
            return self.ledger.call(self._plan, step)
        except (Fenced, RunStopped, SourceBroken):
            raise
        except RollbookError as error:
            if self.ranks.size > 1:
                text = f"{type(error).__name__}: {error}"
                self.ledger.call(plans.fail_share, self.run, self.epoch, self.share, step, text)
            raise

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

    def _plan(self, tx: Tx, step: int) -> Planned | Waiting:
        answer = plans.plan(tx, self.run, self.epoch, self.share, step)
        if isinstance(answer, Planned) and not answer.replayed:
            failpoints.reach("plan_mid")
        return answer


def _vote(answer: Planned | Waiting | None) -> tuple[str, str]:
    """An answer of PLAN as the other ranks see it: its kind and its reason."""
    if isinstance(answer, Waiting):
        return answer.kind, answer.reason
    return "planned", ""


def _waits_for(missing: Sequence[tuple[str, str]]) -> tuple[Kind, str]:
    """What a step waits for, of the votes of the shares that lack a plan: a hold before all."""
    kind, reason = next((vote for vote in missing if vote[0] == "hold"), missing[0])
    match kind:
        case "hold":
            return "hold", reason
        case "paused":
            return "paused", reason
    return "groups", reason
