"""The staleness bound in the ledger's own SQL, for each bound and lag: never off by one."""

import pytest

from storage.database import Ledger
from storage.plans import Waiting
from tests.rehearsal import Rehearsal, configuration


def at_version_3(ledger: Ledger, bound: int) -> tuple[Rehearsal, list[int]]:
    """Eight groups of one rollout are submitted, four a step; then `max_lag` becomes `bound`."""
    run = Rehearsal(
        ledger,
        configuration(
            tasks={"batch_size": 4},
            groups={"size": 1},
            trainer={"estimator": "mean"},
            schedule={"order": "admission", "ahead": 1, "max_lag": 2},
        ),
    ).begin()
    run.train(3)
    schedule = "config #> '{run,schedule}' || jsonb_build_object('ahead', 0, 'max_lag', %s::int)"
    run.do(f"UPDATE runs SET config = jsonb_set(config, '{{run,schedule}}', {schedule})", bound)
    groups = [group for group, place in run.states().items() if place == "submitted"]
    assert len(groups) == 8
    return run, groups


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_finished_rollouts_are_sent_back_exactly_beyond_the_bound(
    ledger: Ledger, bound: int
) -> None:
    run, groups = at_version_3(ledger, bound)
    for lag in range(4):
        run.complete(groups[lag], version=3 - lag)
    assert isinstance(run.plan(), Waiting)
    places = run.states()
    assert [places[groups[lag]] for lag in range(4)] == [
        "queue" if lag <= bound else "submitted" for lag in range(4)
    ]
    sent_back = run.rows("SELECT count(*) AS n FROM attempts WHERE resubmitted_as = 'stale'")
    assert sent_back == [{"n": 3 - bound}]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_running_rollouts_are_cancelled_exactly_beyond_the_bound(
    ledger: Ledger, bound: int
) -> None:
    run, groups = at_version_3(ledger, bound)
    for lag in range(1, 4):  # at version 4
        run.start(groups[lag])
        run.do(
            "UPDATE attempts SET oldest_version = %s, newest_version = 3 WHERE group_id = %s",
            4 - lag,
            groups[lag],
        )
    for group in groups[4:]:
        run.complete(group)
    assert run.planned() == groups[4:]
    run.apply()
    told = run.rows(
        "SELECT cancel_cause AS cause FROM attempts WHERE state = 'running' ORDER BY group_id"
    )
    assert [row["cause"] for row in told] == [
        None if lag <= bound else "stale" for lag in range(1, 4)
    ]
