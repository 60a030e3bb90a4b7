"""Registration and hand-over: what was drawn stays what it was, and places are given away once."""

from dataclasses import asdict

import pytest

from domain.errors import ConfigError, DataChanged, LedgerError
from domain.messages import GroupIn
from domain.rollouts import Task
from storage import checkpoints, runs, tasks
from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration, digest


def register(run: Rehearsal, batch: int, drawn: list[Task]) -> None:
    run.ledger.call(tasks.register_batch, "r1", run.epoch, 0, batch, drawn, {"batch": batch + 1})


def test_the_same_batch_may_be_registered_again(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    for _ in range(2):
        run.register(0)
    assert run.rows("SELECT group_id, task_id, task FROM groups ORDER BY 1") == [
        {"group_id": 0, "task_id": "t0.0", "task": {"n": 0}},
        {"group_id": 1, "task_id": "t0.1", "task": {"n": 1}},
    ]


def test_changed_data_is_refused(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.register(0)
    swapped = run.tasks(0)[::-1]
    with pytest.raises(DataChanged, match=r"batch 0.*t0\.0.*now it has.*t0\.1"):
        register(run, 0, swapped)
    other = [Task("t0.0", {"n": 0}), Task("t0.1", {"n": 99})]
    with pytest.raises(DataChanged, match="same task ids with other content"):
        register(run, 0, other)
    with pytest.raises(DataChanged):
        register(run, 0, run.tasks(0)[:1])


def test_key_order_inside_a_task_is_no_change(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    register(run, 0, [Task("t", {"a": 1, "b": [2.5, "é"]})])
    register(run, 0, [Task("t", {"b": [2.5, "é"], "a": 1})])


def test_batches_come_in_order_within_the_recorded_end(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(), batches=2).begin()
    with pytest.raises(LedgerError, match="out of order; next is 0"):
        run.register(1)
    run.register(0)
    run.register(1)
    with pytest.raises(DataChanged, match="at least 2 batches and now ends after 1"):
        ledger.call(tasks.end_of_data, "r1", run.epoch, 0, 1)
    run.register(2)  # says that the data ended
    run.register(2)
    with pytest.raises(DataChanged, match="ended after 2 batches and now ends after 3"):
        ledger.call(tasks.end_of_data, "r1", run.epoch, 0, 3)
    with pytest.raises(DataChanged, match="ends after 2 batches, now there is batch 2"):
        register(run, 2, run.tasks(2))


def test_a_batch_has_one_to_batch_size_tasks_of_json(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    with pytest.raises(ConfigError, match="has 3 tasks"):
        register(run, 0, [Task(str(i)) for i in range(3)])
    with pytest.raises(ConfigError, match="has 0 tasks"):
        register(run, 0, [])
    for value in (float("nan"), object()):
        with pytest.raises(ConfigError, match="JSON"):
            register(run, 0, [Task("t", {"x": value})])


def test_dataset_order_hands_over_the_batches_ahead(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"ahead": 2, "max_lag": 2})).begin()
    first = ledger.call(tasks.hand_over, "r1", run.epoch, 0)
    assert (first.submitted, first.need_batch, first.outstanding) == (0, 0, 0)
    done = run.hand_over()
    assert (done.submitted, done.outstanding) == (6, 6)
    assert run.value("SELECT handed_over FROM shares") == 2
    assert run.hand_over().submitted == 0


def test_other_orders_keep_their_places_filled(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"order": "deadline"})).begin()
    assert run.hand_over().outstanding == 4  # (ahead + 1) * B
    run.complete(0)
    run.complete(1)
    assert run.hand_over().submitted == 0  # admitted rows hold their places
    run.planned()
    assert run.hand_over().submitted == 0  # and so do planned ones, also after a restart
    run.take_over()
    assert run.hand_over().submitted == 0
    run.apply()
    run.serve(1)
    assert run.hand_over().submitted == 2
    run.abandon(2)
    assert run.hand_over().submitted == 1  # its place is free at once


def test_submissions_are_stamped_with_the_served_version(ledger: Ledger) -> None:
    run = Rehearsal(
        ledger, configuration(schedule={"order": "deadline", "sync_every": 2, "max_lag": 2})
    ).begin()
    run.hand_over()
    for group in (0, 1):
        run.complete(group)
    run.planned()
    run.apply()  # version 1 is not published: sync_every = 2
    run.hand_over()
    assert run.group(4)["submitted_version"] == 0


def test_the_submit_gate_gives_no_place_away_twice(ledger: Ledger) -> None:
    config = configuration(schedule={"order": "deadline", "stale_policy": "wait", "max_lag": 1})
    run = Rehearsal(ledger, config).begin()
    assert run.hand_over().submitted == 4
    run.complete(0)
    run.complete(1)
    run.planned()
    run.take_over()
    assert run.hand_over().submitted == 0
    run.apply()
    # Version 0 is still served: new groups would be due at version 1, whose places 2 and 3 hold.
    assert run.hand_over().submitted == 0
    run.serve(1)
    assert run.hand_over().submitted == 2


def test_the_workflow_gets_what_it_needs(ledger: Ledger) -> None:
    config = configuration(
        groups={
            "size": 3,
            "oversample": 1,
            "timeout": 40.0,
            "completion": {"mode": "deadline", "min_members": 2, "max_straggler_tokens": 5},
        },
        schedule={"allow_trajectory_loss": True},
    )
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    start = run.commands("start_group")[0]
    fields = dict(start["payload"])
    fields["samples"] = tuple((s, a) for s, a in fields["samples"])
    assert GroupIn(**fields) == GroupIn(
        run="r1",
        group=0,
        gen=0,
        batch=0,
        task="t0.0",
        environment="default",
        size=3,
        samples=((0, 0), (1, 0), (2, 0), (3, 0)),
        kept=0,
        submitted_version=0,
        timeout_s=40.0,
        hard_cap_s=50.0,
        completion="deadline",
        min_members=2,
        on_stragglers="truncate",
        part0_admitted=False,
    )
    assert set(fields) == set(asdict(GroupIn(**fields)))
    assert start["key"] == run.group(0)["workflow_id"] == "run/r1/b000000/g0~0"


def test_nothing_is_handed_over_before_a_version_is_served(ledger: Ledger) -> None:
    ledger.call(runs.create, configuration(), world={})
    run = Rehearsal(ledger, configuration())
    run.take_over()
    ledger.call(
        checkpoints.create_first,
        "r1",
        run.epoch,
        weights_sha256=digest(0),
        manifest_key="k",
        weights_bytes=1,
        probe=None,
        prefix="p",
        manifest_sha256=digest("m"),
        bytes=1,
        data_position={"batch": 0},
        rng={},
        world={},
    )
    assert run.hand_over().submitted == 0
    run.serve(0)
    assert run.hand_over().submitted == 4


def test_poison_tasks_are_set_aside(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(schedule={"order": "deadline"}), batches=3).begin()
    run.do(
        "INSERT INTO quarantine(run_id, task_id, phase, reason, task_sha256) "
        "VALUES ('r1', 't0.1', 'reset', 'raised', %s)",
        digest("t0.1"),
    )
    run.hand_over()
    assert run.states()[1] == "quarantined"
    assert sum(at == "submitted" for at in run.states().values()) == 4
    assert run.value("SELECT quarantined FROM balance") == 1
