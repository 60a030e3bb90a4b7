"""A rewind is a fork: the parent keeps its history, the child owes what was owed then."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from domain.errors import LedgerError
from storage import checkpoints, fork, quarantine, runs, versions
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration, digest


def resumed(ledger: Ledger, parent: Rehearsal, step: int) -> Rehearsal:
    """Fork at `step`, resume the child and publish its version."""
    name = ledger.call(fork.fork, parent.run, parent.epoch, step)
    child = Rehearsal(ledger, ledger.call(runs.read, name).config, batches=parent.batches)
    child.take_over()
    child.serve(child.now().version)
    return child


@pytest.mark.parametrize("order", ["dataset", "deadline"])
def test_a_fork_trains_again_what_came_after_its_step(ledger: Ledger, order: str) -> None:
    parent = Rehearsal(ledger, configuration(schedule={"order": order}), batches=5).begin()
    for _ in range(3):
        parent.train(1)
        parent.checkpoint()
    before = parent.states()
    child = resumed(ledger, parent, 1)
    assert child.run == "r1.2"
    now = child.now()
    assert (now.parent, now.forked_at, now.first_step, now.next_step) == ("r1", 1, 1, 1)
    assert (now.version, now.first_version, now.state) == (1, 1, "running")
    assert child.states() == dict.fromkeys(sorted(before)[2:], "registered")
    assert parent.now().state == "closed"
    assert {g: parent.states()[g] for g in range(6)} == dict.fromkeys(range(6), "trained")
    while child.now().next_step < 5:
        child.train(1)
        child.checkpoint()
    assert child.states() == dict.fromkeys(range(2, 10), "trained")


def test_forks_of_forks_count_on(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    run.checkpoint()
    second = resumed(ledger, run, 1)
    second.train(1)
    second.checkpoint()
    assert resumed(ledger, second, 1).run == "r1.3"
    assert ledger.call(fork.fork, "r1", run.take_over(), 0) == "r1.4"


def test_a_fork_needs_a_durable_checkpoint(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    with pytest.raises(LedgerError, match="no durable checkpoint 1; choose one of: 0"):
        ledger.call(fork.fork, "r1", run.epoch, 1)
    assert run.now().state == "running"


def test_weights_the_parent_never_uploaded_are_the_childs_to_upload(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"sync_every": 2, "max_lag": 2})).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    run.checkpoint()
    name = ledger.call(fork.fork, "r1", run.epoch, 1)
    assert ledger.call(versions.state, name, 1) == "computed"


def test_whoever_lets_go_of_a_shared_checkpoint_last_deletes_it(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(checkpoint={"keep": 1}), batches=4).begin()
    for _ in range(2):
        run.train(1)
        run.checkpoint()
    child = resumed(ledger, run, 1)
    assert [row.step for row in ledger.call(checkpoints.retire, "r1")] == [0]
    ledger.call(checkpoints.deleted, "r1", [0])
    assert checkpoint_states(run) == {
        ("r1", 0): "deleted",
        ("r1", 1): "deleted",
        ("r1", 2): "durable",
        ("r1.2", 1): "durable",
    }
    child.train(1)
    child.checkpoint()
    (last,) = ledger.call(checkpoints.retire, "r1.2")
    assert (last.step, last.prefix) == (
        1,
        run.value("SELECT s3_prefix FROM checkpoints WHERE run_id = 'r1' AND step = 1"),
    )
    assert ledger.call(checkpoints.retire, "r1") == []


def test_runs_that_let_go_of_a_shared_checkpoint_at_once_delete_it_once(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(checkpoint={"keep": 1}), batches=4).begin()
    for _ in range(2):
        run.train(1)
        run.checkpoint()
    child = resumed(ledger, run, 1)
    child.train(1)
    child.checkpoint()
    together = threading.Barrier(2)

    def retire(name: str) -> list[int]:
        with ledger.transaction() as tx:
            together.wait(20)
            return [row.step for row in checkpoints.retire(tx, name)]

    with ThreadPoolExecutor(2) as pool:
        steps = [future.result() for future in [pool.submit(retire, n) for n in ("r1", "r1.2")]]
    assert sorted(step for found in steps for step in found) == [0, 1]


def checkpoint_states(run: Rehearsal) -> dict[tuple[str, int], str]:
    rows = run.rows("SELECT run_id, step, state FROM checkpoints")
    return {(row["run_id"], row["step"]): row["state"] for row in rows}


def test_tasks_that_are_set_aside_stay_so(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"ahead": 0}), batches=4).begin()
    run.train(1)
    run.checkpoint()
    for task, released in (("t1.0", "now()"), ("t1.1", "NULL")):
        run.do(
            "INSERT INTO quarantine(run_id, task_id, phase, reason, task_sha256, released_at) "
            f"VALUES ('r1', %s, 'reset', 'it breaks', %s, {released})",
            task,
            digest(task),
        )
    child = resumed(ledger, run, 1)
    assert [row.task for row in ledger.call(quarantine.listed, child.run)] == ["t1.1"]
    child.hand_over()
    assert child.states() == {2: "submitted", 3: "quarantined"}


def test_a_group_closed_before_the_step_stays_closed(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"order": "deadline"})).begin()
    run.hand_over()
    run.abandon(3)
    run.train(1)
    run.checkpoint()
    run.abandon(2)
    name = ledger.call(fork.fork, "r1", run.epoch, 1)
    child = Rehearsal(ledger, ledger.call(runs.read, name).config)
    assert 3 not in child.states()
    assert child.states()[2] == "registered"  # the parent abandoned it only afterwards
