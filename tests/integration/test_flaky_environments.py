"""Environments that crash now and then cost attempts, not groups, and no kind of task more than another."""

import random
from collections import Counter

from domain.rollouts import Status, Task
from storage.attempts import Ending
from storage.database import Ledger
from storage.plans import Planned
from tests.rehearsal import configuration
from tests.staged import Staged

GROUPS, SIZE, ATTEMPTS = 48, 2, 3
KINDS = ("short", "long")
CRASHED = Ending(status=Status.INFRA_ERROR, error_type="E", error="the container went away")


def test_a_fifth_of_the_rollouts_crashes_and_only_three_crashes_in_a_row_abandon(
    ledger: Ledger,
) -> None:
    chance = random.Random(3)
    crashes = {
        (group, sample, attempt): chance.random() < 0.2
        for group in range(GROUPS)
        for sample in range(SIZE)
        for attempt in range(ATTEMPTS)
    }
    doomed = {
        group
        for group in range(GROUPS)
        if any(all(crashes[group, s, a] for a in range(ATTEMPTS)) for s in range(SIZE))
    }
    assert 0 < len(doomed) < 0.05 * GROUPS  # 1.6 % are expected
    run = Staged(
        ledger,
        configuration(
            steps=1000,
            tasks={"batch_size": 4},
            groups={"size": SIZE, "max_attempts": ATTEMPTS},
            schedule={"order": "deadline", "stale_policy": "wait", "max_lag": 2},
        ),
        batches=GROUPS // 4,
    )
    run.tasks = lambda batch: [Task(f"{KINDS[i % 2]}-{batch}.{i}", {}) for i in range(4)]  # type: ignore[method-assign]
    run.begin()
    trained: list[int] = []
    while True:
        run.hand_over_and_deliver()
        for workflow in run.working():
            for activity in [workflow.live[sample] for sample in sorted(workflow.live)]:
                at = activity.at
                broken = crashes[at.group, at.sample, at.attempt]
                good = Ending(status=Status.COMPLETED, reward=float(at.sample))
                if workflow.live.get(at.sample) is activity:  # its sibling may have ended the group
                    run.play(workflow, activity, CRASHED if broken else good)
        answer = run.plan()
        if isinstance(answer, Planned):
            trained += [row.group for row in answer.rows]
            run.serve(run.apply())
        elif answer.kind == "end":
            break
    places = run.states()
    assert {group for group, place in places.items() if place == "abandoned"} == doomed
    assert sorted(trained) == sorted(set(range(GROUPS)) - doomed)
    kinds = Counter(run.group(group)["task_id"].partition("-")[0] for group in trained)
    lost = Counter(KINDS[group % 4 % 2] for group in doomed)
    assert {kind: kinds[kind] + lost[kind] for kind in KINDS} == dict.fromkeys(KINDS, GROUPS // 2)
    again = run.value(
        "SELECT count(*) FROM attempts WHERE run_id = %s AND resubmitted_as = 'infra_error'",
        run.run,
    )
    assert again > 0.15 * GROUPS * SIZE
