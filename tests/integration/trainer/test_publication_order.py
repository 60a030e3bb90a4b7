"""What is served when rollouts are submitted: by `sync_every`, and after a death by the ledger alone."""

from pathlib import Path

import pytest

from domain import failpoints
from domain.services import Services
from storage.database import Ledger
from tests.playing import Fleet, configuration
from tests.trained import create, train


class Killed(BaseException):
    """The trainer's process ends here; nothing closes the run."""


def train_and_die(run: str, around: Services, fleet: Fleet, point: str, visit: int) -> None:
    """Train until the n-th visit of a failpoint, at which the process ends."""
    visits = 0

    def reach(name: str) -> None:
        nonlocal visits
        visits += name == point
        if name == point and visits == visit:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "reach", reach)
        with pytest.raises(Killed):
            train(run, around, fleet)


def submitted_under(ledger: Ledger, run: str) -> list[set[int]]:
    """Versions that the attempts of each batch were submitted under."""
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT array_agg(DISTINCT a.submitted_version::int) AS seen FROM groups g "
            "JOIN attempts a USING (run_id, group_id) WHERE run_id = %s "
            "GROUP BY g.batch ORDER BY g.batch",
            (run,),
        ).fetchall()
    return [set(row["seen"]) for row in rows]


def test_s17_s18_rollouts_are_submitted_under_what_is_served_and_a_push_comes_before(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    schedule = {"sync_every": 2, "ahead": 1, "max_lag": 2}
    run = create(ledger, configuration(name, tmp_path, steps=6, schedule=schedule))
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet) == "finished"
        assert fleet.loaded == [0, 2, 4, 6]
    # At version 1 nothing is due, and batch 2 goes out under 0; at 2 it is pushed first.
    assert submitted_under(ledger, run) == [{0}, {0}, {0}, {2}, {2}, {4}]


@pytest.mark.parametrize(
    ("point", "visit", "sync_every", "before", "after", "submitted"),
    [
        pytest.param(
            *("apply_done", 2, 1, [0, 1], [0, 1, 2, 3, 4], [{0}, {0}, {1}, {2}]),
            id="S18b: at version 2, 1 is served, checkpoint of 0",
        ),
        pytest.param(
            *("p_served", 1, 1, [0, 1], [0, 1, 2, 3, 4], [{0}, {0}, {1}, {2}]),
            id="S18c: at version 1, 1 is served, checkpoint of 0",
        ),
        pytest.param(
            *("apply_done", 2, 2, [0], [0, 2, 4], [{0}, {0}, {0}, {2}]),
            id="at version 2, 0 is served, checkpoint of 1, which never was",
        ),
    ],
)
def test_a_restarted_trainer_replays_then_pushes_what_is_due_then_submits(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    point: str,
    visit: int,
    sync_every: int,
    before: list[int],
    after: list[int],
    submitted: list[set[int]],
) -> None:
    schedule = {"sync_every": sync_every, "max_lag": 2}
    checkpoint = {"every": 1 if sync_every == 2 else 2}
    config = configuration(name, tmp_path, schedule=schedule, checkpoint=checkpoint)
    run = create(ledger, config)
    with Fleet(around, tmp_path / "engine") as fleet:
        train_and_die(run, around, fleet, point, visit)
        assert fleet.loaded == before
        assert train(run, around, fleet, force=True) == "finished"
        assert fleet.loaded == after  # neither a restored version nor the same one twice
    assert submitted_under(ledger, run) == submitted
