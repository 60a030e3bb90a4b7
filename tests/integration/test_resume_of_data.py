"""No task is lost, skipped or trained twice: what a resume does with groups that were on their way.

One kind of fault each, on the ledger, with the product's own transactions.
"""

import random
from typing import Any

import pytest

from domain.messages import AttemptIn
from domain.rollouts import Task
from storage.database import Ledger
from storage.plans import Planned, Waiting
from tests.rehearsal import configuration
from tests.staged import Staged


def staged(ledger: Ledger, batches: int, batch_size: int, **sections: Any) -> Staged:
    run = Staged(
        ledger,
        configuration(
            steps=1000,
            tasks={"batch_size": batch_size},
            groups={"size": 1} | sections.pop("groups", {}),
            trainer={"estimator": "mean"} | sections.pop("trainer", {}),
            **sections,
        ),
        batches=batches,
    )
    run.begin()
    run.hand_over_and_deliver()
    return run


def planned(run: Staged) -> list[int]:
    plan = run.plan()
    assert isinstance(plan, Planned), plan
    return [row.group for row in plan.rows]


def step(run: Staged) -> list[int]:
    """Train a step and serve what it made; its groups."""
    trained = planned(run)
    run.serve(run.apply())
    run.hand_over_and_deliver()
    return trained


def resume(run: Staged) -> None:
    """The trainer is gone; another one takes over."""
    run.take_over()
    run.hand_over_and_deliver()


def play_on(run: Staged) -> list[int]:
    """Train to the end of the data; the groups in training order."""
    trained: list[int] = []
    while True:
        for workflow in run.working():
            run.play_out(workflow)
        answer = run.plan()
        if isinstance(answer, Waiting):
            assert answer.kind == "end", answer
            return trained
        trained += step(run)


def attempts(run: Staged) -> dict[int, int]:
    """Attempts by group."""
    rows = run.rows(
        "SELECT group_id, count(*) AS n FROM attempts WHERE run_id = %s GROUP BY 1", run.run
    )
    return {row["group_id"]: row["n"] for row in rows}


def test_ready_groups_are_used_again_and_those_in_flight_run_again(ledger: Ledger) -> None:
    """Three ready, five in flight, two drawn: a close keeps the first and owes all others."""
    run = staged(ledger, 5, 2, schedule={"order": "admission", "ahead": 3, "max_lag": 3})
    run.register(4)  # drawn ahead of its hand-over
    run.roll_out(0, 0)
    run.roll_out(1, 0)
    run.roll_out(2, 0)
    for group in range(3, 8):
        run.begin_rollout(group, 0)
    position = run.drawn()
    run.checkpoint()
    run.close_run()
    assert sorted(g for g, at in run.states().items() if at == "queue") == [0, 1, 2]
    resume(run)
    assert run.drawn() == position
    assert sorted(play_on(run)) == list(range(10))
    tried = attempts(run)
    assert [tried[group] for group in range(10)] == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1]


def test_only_the_missing_rollouts_of_a_group_run_again(ledger: Ledger) -> None:
    """Five of eight had finished; the age of the group is that of the oldest of both kinds."""
    run = staged(
        ledger,
        2,
        1,
        groups={"size": 8},
        schedule={"order": "dataset", "ahead": 1, "max_lag": 1},
    )
    run.roll_out(1, *range(5))
    run.roll_out(0, *range(8))
    step(run)
    run.close_run()
    resume(run)
    assert sorted(run.workflow(1).live) == [5, 6, 7]
    run.roll_out(1, 5, 6, 7)
    plan = run.plan()
    assert isinstance(plan, Planned)
    assert [(row.group, row.lag) for row in plan.rows] == [(1, 1)]
    versions = run.rows(
        "SELECT pinned_version AS v FROM attempts WHERE run_id = %s AND group_id = 1 AND member "
        "ORDER BY sample",
        run.run,
    )
    assert [row["v"] for row in versions] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_groups_beyond_the_batch_stay_ready_and_are_next(ledger: Ledger) -> None:
    """Ten are ready, three are taken: seven stay, in their order."""
    run = staged(ledger, 4, 3, schedule={"order": "admission", "ahead": 3, "max_lag": 9})
    order = [5, 9, 1, 0, 7, 2, 8, 3, 6, 4]
    for group in order:
        run.roll_out(group, 0)
    trained = [step(run)]
    ready = run.rows(
        "SELECT group_id FROM queue WHERE run_id = %s AND state = 'admitted' ORDER BY admitted_seq",
        run.run,
    )
    assert [row["group_id"] for row in ready] == order[3:]
    resume(run)
    trained += [step(run), step(run)]
    assert trained == [order[:3], order[3:6], order[6:9]]


def test_batches_sampled_ahead_of_a_checkpoint_are_trained_and_the_data_ends_once(
    ledger: Ledger,
) -> None:
    """Eight tasks, two a batch, four sampled at once; the trainer dies after its first step."""
    run = staged(ledger, 4, 2, schedule={"order": "dataset", "ahead": 1, "max_lag": 1})
    for group in (0, 1, 2, 3):
        run.roll_out(group, 0)
    assert step(run) == [0, 1]
    run.checkpoint()
    resume(run)
    assert play_on(run) == [2, 3, 4, 5, 6, 7]
    assert sorted(run.states()) == list(range(8))


def test_a_group_that_went_stale_holds_back_nothing_else(ledger: Ledger) -> None:
    """Group 2 grows too old while the others train; they are not trained again, it is still owed."""
    run = staged(ledger, 20, 1, schedule={"order": "admission", "ahead": 2, "max_lag": 2})
    run.begin_rollout(2, 0)
    trained: list[int] = []
    for _ in range(10):
        for workflow in run.working():
            if workflow.start.group != 2 and len(trained) < 10:
                run.play_out(workflow)
        trained += step(run)
    run.checkpoint()
    resume(run)
    assert 2 not in trained
    assert run.states()[2] == "submitted"
    rest = play_on(run)
    assert sorted([*trained, *rest]) == list(range(20))
    assert run.value(
        "SELECT count(*) FROM attempts WHERE run_id = %s AND group_id = 2 "
        "AND resubmitted_as = 'stale' AND NOT counts_as_failure",
        run.run,
    )


def test_two_epochs_of_ten_tasks_are_twenty_trainings_though_it_is_resumed(
    ledger: Ledger,
) -> None:
    """Batches of four; the trainer dies when the thirteenth rollout is on its way."""
    tasks = [str(n % 10) for n in range(20)]
    run = Staged(
        ledger,
        configuration(
            steps=1000,
            tasks={"batch_size": 4},
            groups={"size": 1},
            trainer={"estimator": "mean"},
            schedule={"ahead": 0, "max_lag": 0},
        ),
        batches=5,
    )
    run.tasks = lambda batch: [Task(task, {}) for task in tasks[4 * batch : 4 * batch + 4]]  # type: ignore[method-assign]
    run.begin()
    run.hand_over_and_deliver()
    trained: list[int] = []
    for _ in range(3):
        for workflow in run.working():
            run.play_out(workflow)
        trained += step(run)
    run.begin_rollout(12, 0)
    run.checkpoint()
    resume(run)
    trained += play_on(run)
    assert sorted(tasks[group] for group in trained) == sorted(tasks)
    assert trained == list(range(20))


def test_groups_that_do_not_fit_leave_their_places_to_others(ledger: Ledger) -> None:
    """Nine groups of a batch that fill the step between them, and one that fits nowhere."""
    run = staged(
        ledger,
        2,
        10,
        trainer={"overflow": "cut", "rows": 1, "width": 16},
        budget={"max_generated_tokens": 12, "segment_tokens": 12, "max_context_tokens": 16},
    )
    for group in range(10):
        run.roll_out(group, 0, segments=1 if group else 4)
    trained = step(run)
    assert trained
    places = list(run.states().values())
    assert places.count("cut") == 10 - len(trained)
    assert {places[group] for group in range(10)} == {"queue", "cut"}
    for group in range(10, 20):
        run.roll_out(group, 0)
    assert step(run)  # their slots are free again


@pytest.mark.parametrize("order", ["deadline", pytest.param("dataset", marks=pytest.mark.slow)])
def test_five_deaths_of_everything_lose_and_repeat_no_task_however_long_it_takes(
    ledger: Ledger, order: str
) -> None:
    """64 tasks; task i takes i seconds, which are counted here. What dies starts from nothing."""
    schedule: dict[str, Any] = {"order": order, "ahead": 1, "max_lag": 2}
    if order == "deadline":
        schedule |= {"stale_policy": "wait"}
    run = staged(ledger, 16, 4, groups={"size": 2}, schedule=schedule)
    deaths = sorted(random.Random(7).sample(range(20, 400), 5))
    began: dict[AttemptIn, int] = {}
    trained: list[int] = []
    second = 0
    while True:
        if deaths and second == deaths[0]:
            del deaths[0]
            for workflow in run.working():
                run.cluster.leave(workflow)
            run.take_over()
            run.cluster.sweep()
        run.hand_over_and_deliver()
        ends = deaths[:1]
        for workflow in run.working():
            task = workflow.start.group
            for sample, activity in sorted(workflow.live.items()):
                if activity.at not in began:
                    began[activity.at] = second
                    run.begin_rollout(task, sample)
                if (end := began[activity.at] + task) <= second:
                    run.end_rollout(task, sample, float(sample))
                else:
                    ends.append(end)
        answer = run.plan()
        if isinstance(answer, Planned):
            trained += [row.group for row in answer.rows]
            run.serve(run.apply())
            run.checkpoint()
        elif answer.kind == "end":
            break
        else:
            second = min(ends)  # nothing happens until then
    assert deaths == []
    assert sorted(trained) == list(range(64))
    lost = run.value("SELECT count(*) FROM attempts WHERE run_id = %s AND state = 'lost'", run.run)
    assert lost >= 5
    assert not run.rows("SELECT 1 FROM attempts WHERE run_id = %s AND counts_as_failure", run.run)
