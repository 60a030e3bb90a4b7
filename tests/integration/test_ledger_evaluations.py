"""Versions chosen for evaluation: kept while nothing else needs the slot, evaluated once, never in the way."""

import pytest

from domain.config import RunConfig
from storage import evaluations, garbage, runs, versions
from storage.database import Ledger, Tx
from storage.evaluations import Result
from tests.rehearsal import ENGINE, Rehearsal, configuration

DATA = "m:held_out"
RESULTS = [Result(task="t", sample=0, status="completed", reward=1.0)]


def config(**schedule: object) -> RunConfig:
    return configuration(
        evaluation={"dataset": DATA, "every": 2}, schedule={"order": "deadline"} | schedule
    )


def begin(ledger: Ledger, slots: int = 8) -> Rehearsal:
    run = Rehearsal(ledger, config()).begin()
    resize(run, slots)
    return run


def resize(run: Rehearsal, slots: int) -> None:
    run.ledger.call(versions.see_engine, run.run, ENGINE, 1, slots, 3600.0)


def step(run: Rehearsal, *, serve: bool = True) -> None:
    """Train one step; its version is served, by an engine of as many slots as before."""
    run.hand_over()
    for row in run.rows("SELECT group_id FROM groups WHERE state = 'submitted' LIMIT 2"):
        run.complete(row["group_id"])
    run.planned()
    run.apply()
    if serve:
        slots = run.value("SELECT max_resident FROM engines")
        run.serve(run.now().version)
        resize(run, slots)


def pinned(run: Rehearsal) -> list[int]:
    return [r["version"] for r in run.rows("SELECT version FROM evaluation_pins ORDER BY 1")]


def test_the_version_before_every_nth_step_is_pinned_as_the_step_is_planned(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(5):
        step(run)
    assert pinned(run) == [2, 4]  # not 0: nothing was learned before it
    run.take_over()
    assert pinned(run) == [2, 4]  # a restart changes nothing


def test_a_pinned_version_stays_on_the_engines_when_it_is_superseded(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(5):
        step(run)
    ledger.call(versions.retire, run.run)
    assert ledger.call(evaluations.next_pinned, run.run) == 2
    assert {2, 4} <= set(ledger.call(versions.wanted, run.run))
    assert {r.version for r in ledger.call(versions.routable, run.run)} >= {2, 4, 5}
    ledger.call(evaluations.finish, run.run, DATA, 2, RESULTS)
    ledger.call(versions.retire, run.run)
    assert 2 not in ledger.call(versions.wanted, run.run)
    assert ledger.call(evaluations.next_pinned, run.run) == 4


@pytest.mark.parametrize(
    ("slots", "kept"),
    [
        (8, [2, 4, 6]),
        (4, [4, 6]),  # the version to publish, the served one, and two
        (3, [6]),
        (2, []),
        (1, []),
    ],
)
def test_a_publication_takes_the_slots_it_needs_from_the_oldest(
    ledger: Ledger, slots: int, kept: list[int]
) -> None:
    run = begin(ledger)
    for _ in range(7):
        step(run)
    step(run, serve=False)
    resize(run, slots)
    run.record_weights(8)
    assert ledger.call(versions.publish, run.run, run.epoch, 8)  # never held for an evaluation
    assert pinned(run) == kept


def test_results_and_release_are_one(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(3):
        step(run)

    def killed_before_the_commit(tx: Tx) -> None:
        evaluations.finish(tx, run.run, DATA, 2, RESULTS)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        ledger.call(killed_before_the_commit)
    assert pinned(run) == [2]
    assert ledger.call(evaluations.summary, run.run, DATA) == []
    for _ in range(2):  # delivered twice
        ledger.call(evaluations.finish, run.run, DATA, 2, RESULTS)
    assert pinned(run) == []
    assert run.rows("SELECT version, n, mean, solved::int FROM evaluation_by_version") == [
        {"version": 2, "n": 1, "mean": 1.0, "solved": 1}
    ]


def test_what_lost_its_slot_is_due_at_the_end(ledger: Ledger) -> None:
    run = begin(ledger, slots=1)
    for _ in range(5):
        step(run)
    for _ in range(4):
        for version in ledger.call(versions.retire, run.run):
            ledger.call(versions.unloaded, run.run, ENGINE, version)
    due = ledger.call(evaluations.due, run.run, DATA, every=2)
    assert {2, 4, 5} <= set(due)  # stored still: what is due keeps its weights
    unneeded = [version for version, _ in ledger.call(garbage.unneeded_weights, run.run)]
    assert not {2, 4} & set(unneeded)


def test_without_every_nothing_is_pinned(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(evaluation={"dataset": DATA})).begin()
    for _ in range(3):
        step(run)
    assert pinned(run) == []


def test_a_run_that_ends_lets_go_of_what_it_did_not_evaluate(ledger: Ledger) -> None:
    run = begin(ledger)
    for _ in range(3):
        step(run)
    assert pinned(run) == [2]
    ledger.call(runs.close, run.run, run.epoch, "closed")
    assert pinned(run) == []
