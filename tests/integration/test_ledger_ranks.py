"""Another number of trainer processes goes on with a run's data: every task once, none lost."""

from collections.abc import Sequence

import pytest

from domain.data import TaskStream
from domain.errors import LedgerError
from domain.rollouts import Task
from domain.shares import Division, Share, other_bits
from storage import fork, runs
from storage.database import Ledger
from storage.plans import Planned
from tests.rehearsal import Rehearsal, configuration
from trainer.consumer import Consumer
from trainer.ranks import Ranks
from trainer.waiting import Unfenced, Waits

TASKS = [Task(f"t{i}", {"n": i}) for i in range(24)]
WHOLE = TaskStream(tasks=TASKS, batch_size=2, epochs=1, seed=3)


class Ranked:
    """A rehearsed run with its shares' consumers, over `WHOLE`."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        found = rehearsal.now()
        self.division = Division.of(found.world, found.shares)
        waits = Waits(lambda: False, Unfenced(), patience_s=1)
        self.consumers = [
            Consumer(
                rehearsal.ledger,
                rehearsal.run,
                rehearsal.epoch,
                Share(WHOLE, share, self.division),
                waits,
                Ranks(share, found.shares),
            )
            for share in range(found.shares)
        ]

    def step(self) -> bool:
        """Train one step on every share's oldest groups; False when nothing is left."""
        r = self.rehearsal
        plans = []
        for consumer in self.consumers:
            consumer.hand_over()
            for group in self.submitted(consumer.share)[: r.config.tasks.batch_size]:
                r.complete(group)
            r.share = consumer.share
            plans.append(r.plan())
        if not any(isinstance(plan, Planned) for plan in plans):
            return False
        for consumer, plan in zip(self.consumers, plans, strict=True):
            r.share = consumer.share
            assert isinstance(plan, Planned) or isinstance(r.plan(), Planned)
        r.serve(r.apply())
        r.checkpoint(self.consumers[0].position())
        return True

    def submitted(self, share: int) -> list[int]:
        rows = self.rehearsal.rows(
            "SELECT group_id FROM groups WHERE (run_id, share, state) = (%s, %s, 'submitted') "
            "ORDER BY group_id",
            self.rehearsal.run,
            share,
        )
        return [row["group_id"] for row in rows]

    def trained(self, before: int = 1000) -> list[str]:
        """The tasks of the groups that steps below `before` trained."""
        rows = self.rehearsal.rows(
            "SELECT g.task_id FROM queue q JOIN groups g USING (run_id, group_id) "
            "WHERE q.run_id = %s AND q.step < %s ORDER BY q.step, q.share, q.pos",
            self.rehearsal.run,
            before,
        )
        return [row["task_id"] for row in rows]

    def continued(self, shares: int) -> "Ranked":
        """The child with so many shares, taken over, its data verified and its version served."""
        r = self.rehearsal
        name = r.ledger.call(fork.fork, r.run, r.epoch, None, shares=shares)
        child = Rehearsal(r.ledger, r.ledger.call(runs.read, name).config)
        child.take_over()
        child.serve(child.now().version)
        ranked = Ranked(child)
        position = child.value("SELECT data_position FROM checkpoints WHERE run_id = %s", child.run)
        for consumer in ranked.consumers:
            consumer.verify_data(position)
        return ranked


def begun(ledger: Ledger, order: str, shares: int) -> Ranked:
    config = configuration(
        schedule={"order": order, "max_lag": 9, "ahead": 1},
        trainer={"width": 64, "rows": 4, "ranks": shares},
    )
    return Ranked(Rehearsal(ledger, config).begin(shares=shares))


def drawn(batches: Sequence[int]) -> list[str]:
    return [task.id for batch in batches for task in WHOLE.batch(batch)]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("order", ["dataset", "deadline"])
def test_every_task_is_trained_once(ledger: Ledger, order: str, before: int, after: int) -> None:
    parent = begun(ledger, order, before)
    for _ in range(3):
        assert parent.step()
    child = parent.continued(after)
    now = child.rehearsal.now()
    assert (now.shares, now.config.trainer.ranks, now.first_step) == (after, after, 3)
    while child.step():
        pass
    done, went_on = parent.trained(), child.trained()
    assert sorted(done + went_on) == sorted(drawn(range(12)))
    if order == "dataset":
        assert done == drawn(range(3 * before))
        assert went_on == drawn(range(3 * before, 12))


def test_batches_that_a_slower_share_had_not_drawn_are_drawn_later(ledger: Ledger) -> None:
    parent = begun(ledger, "deadline", 2)
    assert parent.step()
    for consumer in parent.consumers:
        consumer.hand_over()
    for group in parent.submitted(0):  # share 0 loses groups, and so is further in its data
        parent.rehearsal.abandon(group)
    parent.consumers[0].hand_over()
    lost = parent.rehearsal.rows(
        "SELECT task_id FROM groups WHERE run_id = %s AND state = 'abandoned'", parent.rehearsal.run
    )
    batches = parent.rehearsal.rows(
        "SELECT batch, share FROM task_batches WHERE run_id = %s", parent.rehearsal.run
    )
    whole = sorted(2 * row["batch"] + row["share"] for row in batches)
    assert whole != list(range(len(whole)))  # there is a gap
    child = parent.continued(1)
    while child.step():
        pass
    # What was lost after the fork's step is owed again.
    assert len(lost) == 4
    assert sorted(parent.trained(1) + child.trained()) == sorted(drawn(range(12)))


def test_what_was_applied_since_the_checkpoint_forbids_it_and_the_remedy_is_named(
    ledger: Ledger,
) -> None:
    parent = begun(ledger, "deadline", 1)
    assert parent.step()
    r = parent.rehearsal
    r.train(1)
    with pytest.raises(LedgerError, match=r"step 2 .* of step 1: .* Ctrl-C, .* --from-step 1"):
        r.ledger.call(fork.fork, r.run, r.epoch, None, shares=2)
    assert r.now().state == "running"
    child = r.ledger.call(fork.fork, r.run, r.epoch, 1, shares=2)
    assert r.ledger.call(runs.read, child).first_step == 1


def test_the_ledger_tells_what_is_no_longer_bit_exact(ledger: Ledger) -> None:
    parent = begun(ledger, "deadline", 1)
    assert parent.step()
    child = parent.continued(2).rehearsal
    (event,) = child.rows(
        "SELECT step, version, data FROM events WHERE run_id = %s AND kind = 'run.ranks'", child.run
    )
    assert (event["step"], event["version"]) == (1, 1)
    assert (event["data"]["from"], event["data"]["to"]) == (1, 2)
    assert event["data"]["inexact"] == other_bits(1, 2, 1)
    assert child.now().world["shares_before"] == 1
