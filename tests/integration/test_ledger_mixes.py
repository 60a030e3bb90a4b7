"""A mix in the ledger: each group knows its environment, and none has more in flight than it may."""

from typing import Any

from domain.rollouts import Task
from storage import fork
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration

BOTH = ("a", "b")


class Mixed(Rehearsal):
    """Draws a b a b."""

    def tasks(self, batch: int) -> list[Task]:
        size = self.config.tasks.batch_size
        return [Task(f"{BOTH[i % 2]}/{batch}.{i}", {"n": i}) for i in range(size)]

    def flying(self) -> list[str]:
        rows = self.rows("SELECT environment FROM groups WHERE state = 'submitted' ORDER BY 1")
        return [row["environment"] for row in rows]

    def first(self, environment: str) -> int:
        return int(
            self.value(
                "SELECT min(group_id) FROM groups WHERE state = 'submitted' AND environment = %s",
                environment,
            )
        )


def mix(ledger: Ledger, limit: int | None, **schedule: Any) -> Mixed:
    members = [
        {"environment": "a", "source": "m:a", "dataset": "m:d", "in_flight": limit},
        {"environment": "b", "source": "m:b", "dataset": "m:d"},
    ]
    table = {"source": "", "dataset": "", "batch_size": 4, "mix": members}
    run = Mixed(ledger, configuration(tasks=table, schedule={"ahead": 1} | schedule))
    run.begin()
    return run


def test_each_group_goes_to_its_environments_workers(ledger: Ledger) -> None:
    run = mix(ledger, None)
    run.hand_over()
    rows = run.rows(
        "SELECT g.environment, o.payload ->> 'environment' AS queue, g.task_id FROM groups g "
        "JOIN outbox o ON o.key = g.workflow_id ORDER BY g.group_id"
    )
    assert len(rows) == 8
    for row in rows:
        assert row["environment"] == row["queue"] == row["task_id"].partition("/")[0]


def test_no_more_groups_of_an_environment_are_in_flight_than_it_allows(ledger: Ledger) -> None:
    run = mix(ledger, 1, order="deadline")
    run.hand_over()
    assert run.flying() == ["a", "b", "b", "b", "b"]
    assert run.hand_over().submitted == 0
    run.complete(run.first("a"))
    assert run.hand_over().submitted == 1  # the next of a, and nothing else
    assert run.flying() == ["a", "b", "b", "b", "b"]
    run.abandon(run.first("a"))
    run.hand_over()
    assert run.flying().count("a") == 1


def test_a_held_environment_keeps_its_share(ledger: Ledger) -> None:
    """Groups that wait hold their places: the fast environment is not drawn in their stead."""
    run = mix(ledger, 1, order="deadline", max_lag=5)
    for step in range(5):
        run.hand_over()
        while len(run.rows("SELECT 1 FROM queue WHERE state = 'admitted'")) < 4:
            run.complete(run.first("a" if "a" in run.flying() and step % 2 else run.flying()[-1]))
            run.hand_over()
            assert run.flying().count("a") <= 1
        run.planned()
        run.apply()
        run.serve(step + 1)
    drawn = {
        row["environment"]: row["n"]
        for row in run.rows("SELECT environment, count(*) AS n FROM groups GROUP BY 1")
    }
    assert drawn["a"] == drawn["b"]  # as the ratio says
    waiting = run.value("SELECT count(*) FROM groups WHERE state = 'registered'")
    assert waiting <= 8 + 3  # never beyond the window of (ahead + 1) batches, and its last batch


def test_a_resumed_run_counts_what_is_in_flight(ledger: Ledger) -> None:
    run = mix(ledger, 2)
    run.hand_over()
    assert run.flying().count("a") == 2
    run.take_over()
    assert run.hand_over().submitted == 0


def test_a_fork_keeps_the_environments(ledger: Ledger) -> None:
    run = mix(ledger, 1, order="deadline")
    run.hand_over()
    child = ledger.call(fork.fork, run.run, run.epoch, 0)
    rows = "SELECT group_id, environment FROM groups WHERE run_id = '{}' ORDER BY 1"
    assert run.rows(rows.format(child)) == run.rows(rows.format(run.run)) != []


def test_rewards_are_told_by_environment(ledger: Ledger) -> None:
    run = mix(ledger, None)
    run.hand_over()
    for group in range(4):
        run.complete(group)
    run.planned()
    run.apply()
    rows = run.rows("SELECT environment, groups, n FROM reward_by_step ORDER BY 1")
    assert rows == [
        {"environment": "a", "groups": 2, "n": 4},
        {"environment": "b", "groups": 2, "n": 4},
    ]
    by_version = run.rows("SELECT environment, version, n FROM reward_by_version ORDER BY 1")
    assert by_version == [
        {"environment": "a", "version": 0, "n": 4},
        {"environment": "b", "version": 0, "n": 4},
    ]
