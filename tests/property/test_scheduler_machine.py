"""Any interleaving of completions, failures, time-outs, versions and restarts keeps the ledger true.

Hypothesis draws one event after the other: the trainer polls, plans, applies, publishes, dies and is
replaced, closes and comes back; workers start, sample, finish, fail, fall silent and report late;
people cancel; workflows vanish. Every event is the product's own transaction on a real Postgres.
After each one the books must balance and what was decided must stand; and wherever the events stop,
playing on must end with every task accounted for.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from domain.errors import Fenced, LedgerError
from domain.ids import fold
from domain.messages import Closing, FinishGroup
from domain.rollouts import Status
from storage import groups, outbox, plans, runs, tasks, versions
from storage.attempts import Ending
from storage.database import Ledger
from storage.plans import Planned, Waiting
from storage.records import CAUSES
from tests.chaos.crash_world import Activity, Workflow
from tests.rehearsal import configuration
from tests.staged import Staged

PATIENCE = 400
"""Polls without a step that count as a hang."""
PARTS = 20
"""Of twenty long examples each: ten minutes on a quiet machine."""
_numbers = count()

SCHEDULES: dict[str, dict[str, Any]] = {
    "dataset": {"order": "dataset", "stale_policy": "resubmit"},
    "deadline": {"order": "deadline", "stale_policy": "wait"},
    "oldest first": {"order": "deadline", "stale_policy": "resubmit"},
    "admission": {"order": "admission", "stale_policy": "resubmit"},
}

OUTCOMES: dict[str, Callable[[float], Ending]] = {
    "completed": lambda reward: Ending(status=Status.COMPLETED, reward=reward),
    "agent_error": lambda reward: Ending(status=Status.AGENT_ERROR, reward=reward),
    "truncated": lambda reward: Ending(status=Status.TRUNCATED, cause="tokens", reward=reward),
    "unscored": lambda _: Ending(status=Status.TRUNCATED, cause="tokens"),
    "infra_error": lambda _: Ending(status=Status.INFRA_ERROR, error_type="E", error="broke"),
}
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.sampled_from([*sorted(OUTCOMES), "started", "started", "timeout", "lost", "gave up"]),
    ),
    min_size=2,
    max_size=10,
)
log = logging.getLogger(__name__)
CLOSED = ("trained", "cut", "cancelled", "abandoned", "expired")


class Machine(RuleBasedStateMachine):
    """One run, from its creation to its last task."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.ended: dict[int, str] = {}
        self.bound: dict[tuple[int, int], int] = {}

    @initialize(
        schedule=st.sampled_from(sorted(SCHEDULES)),
        ahead=st.integers(0, 2),
        slack=st.integers(0, 1),
        sync_every=st.integers(1, 2),
        size=st.integers(1, 3),
        oversample=st.integers(0, 2),
        spare_groups=st.integers(0, 1),
        cut=st.booleans(),
        filtered=st.booleans(),
        truncation=st.sampled_from(["mask", "score", "zero", "drop"]),
        on_reopen=st.sampled_from(["adopt", "cancel"]),
        bounds=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
        seed=st.integers(0, 9),
    )
    def begin(
        self,
        schedule: str,
        ahead: int,
        slack: int,
        sync_every: int,
        size: int,
        oversample: int,
        spare_groups: int,
        cut: bool,
        filtered: bool,
        truncation: str,
        on_reopen: str,
        bounds: tuple[int, int, int],
        seed: int,
    ) -> None:
        dataset = schedule == "dataset"
        max_attempts, max_stale, max_losses = bounds
        config = configuration(
            name=f"machine-{next(_numbers)}",
            steps=1_000_000,  # it ends with its data
            tasks={"batch_size": 2},
            groups={
                "size": size,
                "oversample": oversample,
                "admit": 2 - spare_groups if dataset else None,
                "max_attempts": max_attempts,
                "max_stale": max_stale,
                "max_losses": max_losses,
            },
            schedule=SCHEDULES[schedule]
            | {
                "ahead": ahead,
                "sync_every": sync_every,
                "max_lag": ahead + sync_every - 1 + slack,
                "on_reopen": on_reopen,
                "max_empty_batches": 100,
                "filter_zero_variance": filtered and size > 1 and not dataset,
                "max_filtered_batches": 100,
            },
            trainer={
                "estimator": "mean",
                "truncation": truncation,
                "overflow": "cut" if dataset and cut else "accumulate",
                "rows": 1,
                "width": 16,
            },
            budget={"max_generated_tokens": 16, "segment_tokens": 16},
        )
        self.config = config
        self.trainer = Staged(self.ledger, config, seed=seed)
        self.cluster = self.trainer.cluster
        self.trainer.begin()
        self.plan: Planned | None = None
        self.closed = False
        self.trainer.hand_over()
        self.cluster.relay()

    def running(self) -> bool:
        return not self.closed

    # -- the trainer

    @precondition(running)
    @rule(applies=st.sampled_from([True, True, True, False]), updated=st.integers(0, 4))
    def poll(self, applies: bool, updated: int) -> None:
        """Publish if due, hand over, plan; and mostly train what was planned."""
        self.publish()
        self.trainer.hand_over()
        answer = self.trainer.plan()
        if self.plan is not None:
            assert isinstance(answer, Planned)
            assert answer.replayed
            assert answer.rows == self.plan.rows
        self.plan = answer if isinstance(answer, Planned) else None
        if applies and self.plan is not None:
            self.trainer.apply(updated=bool(self.plan.rows) and updated > 0)
            self.plan = None

    def publish(self) -> None:
        now = self.trainer.now()
        served = self.ledger.call(versions.served, now.id)
        assert served is not None
        if now.version - served >= self.config.schedule.sync_every:
            self.trainer.serve(now.version)

    @rule()
    def restart(self) -> None:
        """The trainer dies: another one takes the run over, and the old one wakes up."""
        run, old = self.config.name, self.trainer.epoch
        self.trainer.take_over()
        self.closed = False
        step = self.trainer.now().next_step
        self.cluster.relay()
        with pytest.raises(Fenced):
            self.ledger.call(plans.plan, run, old, 0, step)
        with pytest.raises(Fenced):
            self.ledger.call(tasks.hand_over, run, old, 0)

    @precondition(running)
    @rule(closes=st.booleans())
    def keep(self, closes: bool) -> None:
        """A checkpoint, after which the run may be closed until it is taken over again."""
        self.trainer.checkpoint()
        if closes:
            self.ledger.call(runs.close, self.config.name, self.trainer.epoch, "closed")
            self.closed = True

    # -- everything around it

    @rule(events=EVENTS)
    def work(self, events: list[tuple[int, str]]) -> None:
        """The steward delivers, and workers get on."""
        self.cluster.relay()
        self.happen(events)

    @precondition(running)
    @rule(
        events=EVENTS,
        held=st.integers(0, 20),
        partial=st.booleans(),
        completes=st.integers(0, 6),
    )
    def train_past(
        self, events: list[tuple[int, str]], held: int, partial: bool, completes: int
    ) -> None:
        """So many steps that what one group holds may grow too old, while it runs or in the queue:
        it may complete when the step is planned and not yet applied."""
        self.cluster.relay()
        self.happen(events)
        live = self.trainer.working()
        kept = live[held % len(live)] if live else None
        if kept is not None:  # its first rollout ends, the others have begun
            first, *others = (kept.live[sample] for sample in sorted(kept.live))
            for activity in others:
                self.trainer.play(kept, activity, None)
            if partial:
                self.finish(kept, first, "completed")
            else:
                self.trainer.play(kept, first, None)
        for step in range(self.config.schedule.max_lag + 2):
            self.poll(applies=False, updated=1)
            if kept is not None and step == completes:
                self.trainer.play_out(kept)
            self.poll(applies=True, updated=1)
            self.cluster.relay()
            for workflow in self.trainer.working():
                if workflow is not kept:
                    self.trainer.play_out(workflow)

    @rule(which=st.integers(0, 20), by=st.sampled_from(["person", "lost", "nobody"]))
    def interfere(self, which: int, by: str) -> None:
        """A person cancels a group, or Temporal forgets one; the steward sweeps, the dead report."""
        working = self.trainer.working()
        if working and by != "nobody":
            workflow = working[which % len(working)]
            start = workflow.start
            self.cluster.drain(workflow)
            if by == "person":
                cancelled = FinishGroup(
                    run=start.run,
                    group=start.group,
                    gen=start.gen,
                    outcome="cancelled",
                    cause="human",
                )
                self.ledger.call(groups.finish, cancelled)
        self.cluster.sweep()
        self.cluster.haunt()
        self.cluster.relay()

    @rule(which=st.integers(0, 20), outcome=st.sampled_from(["complete", "cancelled", "abandoned"]))
    def confuse(self, which: int, outcome: Closing) -> None:
        """A workflow of an older generation ends its group, or one completes it without members."""
        run, size = self.config.name, self.config.groups.size
        rows = self.trainer.rows(
            "SELECT group_id, gen, state, (SELECT count(*) FROM attempts a WHERE a.member AND "
            "(a.run_id, a.group_id) = (g.run_id, g.group_id)) AS members "
            "FROM groups g WHERE run_id = %s AND (gen > 0 OR state = 'submitted') ORDER BY 1",
            run,
        )
        if not rows:
            return
        row = rows[which % len(rows)]
        if row["gen"] > 0:
            ending = FinishGroup(
                run=run, group=row["group_id"], gen=row["gen"] - 1, outcome=outcome
            )
            verdict = self.ledger.call(groups.finish, ending)
            assert (verdict.applied, verdict.state) == (False, row["state"])
        if row["state"] == "submitted" and row["members"] < size:
            ending = FinishGroup(run=run, group=row["group_id"], gen=row["gen"], outcome="complete")
            with pytest.raises(LedgerError, match="cannot be complete"):
                self.ledger.call(groups.finish, ending)

    # -- what must hold

    @invariant()
    def books_balance(self) -> None:
        run = self.config.name
        t = self.trainer
        assert t.rows("SELECT rule, what FROM ledger_violations WHERE run_id = %s", run) == []
        (b,) = t.rows("SELECT * FROM balance WHERE run_id = %s", run)
        assert b["drawn"] == b["owed"] + sum(b[place] for place in CLOSED) + b["quarantined"], b

    @invariant()
    def what_ended_stays_ended_with_its_cause(self) -> None:
        places = self.trainer.states()
        assert {group: places[group] for group in self.ended} == self.ended
        self.ended = {g: p for g, p in places.items() if p in CLOSED}
        unexplained = self.trainer.rows(
            "SELECT group_id FROM groups WHERE run_id = %s AND closed_cause IS NULL "
            "AND state IN ('cancelled', 'abandoned', 'expired')",
            self.config.name,
        )
        assert unexplained == []

    @invariant()
    def no_group_is_bound_twice_and_none_too_old(self) -> None:
        rows = self.trainer.rows(
            "SELECT group_id, part, step, lag, members FROM queue "
            "WHERE run_id = %s AND step IS NOT NULL",
            self.config.name,
        )
        found = {(row["group_id"], row["part"]): row["step"] for row in rows}
        assert len(found) == len(rows)
        assert self.bound.items() <= found.items()
        self.bound = found
        assert all(row["lag"] <= self.config.schedule.max_lag for row in rows)
        assert all(row["members"] == self.config.groups.size for row in rows)

    @invariant()
    def nothing_runs_on_past_its_bounds(self) -> None:
        """What a version made too old, or failed too often, was told to stop at that moment."""
        rows = self.trainer.rows(
            "SELECT r.version - coalesce(a.oldest_version, a.pinned_version) AS lag "
            "FROM attempts a JOIN runs r USING (run_id) "
            "WHERE run_id = %s AND a.state = 'running' AND a.cancel_cause IS NULL",
            self.config.name,
        )
        assert all(row["lag"] <= self.config.schedule.max_lag for row in rows)
        rows = self.trainer.rows(
            "SELECT group_id, sample, count(*) AS failures FROM attempts a JOIN groups g "
            "USING (run_id, group_id) WHERE run_id = %s AND counts_as_failure "
            "AND g.state NOT IN ('abandoned', 'expired', 'cancelled') "
            "AND NOT EXISTS (SELECT 1 FROM attempts s WHERE s.attempt > a.attempt "
            "AND (s.run_id, s.group_id, s.sample) = (a.run_id, a.group_id, a.sample) "
            "AND s.status IN ('completed', 'truncated', 'agent_error') "
            "AND NOT s.counts_as_failure) GROUP BY 1, 2",  # a success forgives
            self.config.name,
        )
        spared = self.config.groups.oversample > 0  # a spare may stand in for the last failure
        limit = self.config.groups.max_attempts - (not spared)
        assert all(row["failures"] <= limit for row in rows), rows

    @invariant()
    def failures_are_counted_by_their_cause(self) -> None:
        rows = self.trainer.rows(
            "SELECT group_id, sample, resubmitted_as AS cause, state, counts_as_failure AS failure "
            "FROM attempts WHERE run_id = %s AND resubmitted_as IS NOT NULL",
            self.config.name,
        )
        for row in rows:
            innocent = row["cause"] == "stale" or row["state"] == "lost"
            assert row["failure"] != innocent, row

    def teardown(self) -> None:
        """Play on to the end of the data: nothing may be owed, and nothing unexplained."""
        if not hasattr(self, "trainer"):
            return
        try:
            self.play_on()
            (b,) = self.trainer.rows("SELECT * FROM balance WHERE run_id = %s", self.config.name)
            assert b["owed"] == 0, b
            self.books_balance()
            self.what_ended_stays_ended_with_its_cause()
            self.no_group_is_bound_twice_and_none_too_old()
        finally:
            self.ledger.call(runs.fail, self.config.name, "the example is over")
            for command in self.ledger.call(outbox.claim):
                self.ledger.call(outbox.done, [command.id])

    def play_on(self) -> None:
        if self.closed:
            self.restart()
        self.trainer.batches = self.trainer.drawn()
        polls = 0
        while polls < PATIENCE:
            polls += 1
            if self.plan is not None:
                self.trainer.apply(updated=bool(self.plan.rows))
                polls = 0
            self.publish()
            self.trainer.hand_over()
            answer = self.trainer.plan()
            if isinstance(answer, Waiting) and answer.kind == "end":
                self.trainer.checkpoint()
                return
            self.plan = answer if isinstance(answer, Planned) else None
            self.cluster.relay()
            self.cluster.sweep()
            for workflow in list(self.cluster.workflows.values()):
                if workflow.live:
                    self.trainer.play_out(workflow)
        raise AssertionError(f"{self.config.name} hangs at step {self.trainer.now().next_step}")

    def happen(self, events: list[tuple[int, str]]) -> None:
        """Each event meets one of the live attempts."""
        for which, event in events:
            workflows = self.trainer.working()
            live = [(w, w.live[sample]) for w in workflows for sample in sorted(w.live)]
            if not live:
                return
            workflow, activity = live[which % len(live)]
            match event:
                case "started":
                    self.trainer.play(workflow, activity, None)
                case "timeout" | "lost" | "gave up":
                    cause = {"timeout": "timeout", "lost": "infra_error"}.get(event, "cancelled")
                    self.cluster.close(workflow, activity, cause, lost=event == "lost")
                    if activity.fence is not None:
                        self.cluster.ghosts.append(activity)  # what it still sends is refused
                case _:
                    self.finish(workflow, activity, event)

    def finish(self, workflow: Workflow, activity: Activity, outcome: str) -> None:
        reward = float(fold(*asdict(activity.at).values()) % 3)
        self.trainer.play(workflow, activity, OUTCOMES[outcome](reward))


def check(ledger: Ledger, examples: int, length: int, *, of: int = 0) -> None:
    walk = settings(
        max_examples=examples,
        stateful_step_count=length,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=set(Phase) - {Phase.shrink},  # each try costs a second of transactions
    )

    class Seeded(Machine):
        """The machine's `seed` decorator takes a class, its runner any factory."""

        def __init__(self) -> None:
            super().__init__(ledger)

    run_state_machine_as_test(seed(of)(Seeded) if of else Seeded, settings=walk)


@pytest.mark.timeout(300)
def test_any_interleaving_keeps_the_books(ledger: Ledger) -> None:
    check(ledger, examples=10, length=10)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_long_interleavings_keep_the_books(
    fresh_ledger: Callable[[], AbstractContextManager[Ledger]],
) -> None:
    reached: set[str] = set()
    for part in range(
        1, PARTS + 1
    ):  # a ledger that holds many runs is slow to check after each event
        with fresh_ledger() as ledger:
            check(ledger, examples=20, length=30, of=part)
            with ledger.transaction() as tx:
                places = tx.execute("SELECT DISTINCT place AS at FROM group_place")
                reached |= {row["at"] for row in places}
                causes = tx.execute(
                    "SELECT DISTINCT resubmitted_as::text AS at FROM attempts "
                    "WHERE resubmitted_as IS NOT NULL"
                )
                reached |= {f"again: {row['at']}" for row in causes}
        log.info("%d of %d examples", 20 * part, 20 * PARTS)
    assert reached >= {*CLOSED, *(f"again: {cause}" for cause in CAUSES)}
