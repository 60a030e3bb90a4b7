"""The outbox: commands in order, at least once, shared by relays without harm."""

import threading
from concurrent.futures import ThreadPoolExecutor

from storage import idle, outbox, reopen, runs, versions
from storage.database import Ledger, Tx
from storage.outbox import Command
from tests.rehearsal import Rehearsal, configuration


def test_commands_stay_due_until_they_are_done(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    first = ledger.call(outbox.claim, 3)
    assert [c.kind for c in first] == ["start_group"] * 3
    assert ledger.call(outbox.claim, 3) == first
    ledger.call(outbox.done, [c.id for c in first])
    rest = ledger.call(outbox.claim)
    assert [c.key for c in rest] == ["run/r1/b000001/g3~0"]
    tries = run.rows(
        "SELECT tries, last_error FROM outbox WHERE kind = 'start_group' ORDER BY id LIMIT 2"
    )
    assert [tuple(row.values()) for row in tries] == [(2, None), (2, None)]


def test_what_was_never_tried_goes_before_what_failed(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    first = ledger.call(outbox.claim, 3)
    ledger.call(outbox.failed, {c.id: "Temporal is away" for c in first})
    assert [c.key for c in ledger.call(outbox.claim, 3)] == ["run/r1/b000001/g3~0"]
    run.do("UPDATE outbox SET due_at = now() WHERE last_error IS NOT NULL")
    (last, *again) = ledger.call(outbox.claim, 4)[::-1]
    assert again[::-1] == first
    assert last.key == "run/r1/b000001/g3~0"


def test_a_command_that_is_always_refused_is_set_aside_and_says_why(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    poison = ledger.call(outbox.claim, 1)[0].id
    aside = [
        ledger.call(outbox.refused, poison, f"try {n}: too large") for n in range(outbox.REFUSALS)
    ]
    assert aside == [False] * (outbox.REFUSALS - 1) + [True]
    assert ledger.call(outbox.refused, poison, "later") is False
    run.do("UPDATE outbox SET due_at = now()")
    assert poison not in {c.id for c in ledger.call(outbox.claim)}
    (row,) = run.rows("SELECT refusals, last_error, done_at FROM outbox WHERE id = %s", poison)
    assert row == {"refusals": 8, "last_error": "try 7: too large", "done_at": None}
    parts = ledger.call(idle.parts, "r1")
    assert (parts.set_aside, parts.undelivered) == (1, 3)
    assert parts.refusal == "start_group run/r1/b000000/g0~0: try 7: too large"


def test_each_refusal_is_waited_out_for_longer(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    poison = ledger.call(outbox.claim, 1)[0].id
    waits = []
    for _ in range(outbox.REFUSALS):
        ledger.call(outbox.refused, poison, "no")
        waits.append(
            run.value(
                "SELECT round(extract(epoch FROM due_at - now()) * 2) FROM outbox WHERE id = %s",
                poison,
            )
        )
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_start_that_was_set_aside_is_over_with_its_generation(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    poison = ledger.call(outbox.claim, 1)[0].id
    for _ in range(outbox.REFUSALS):
        ledger.call(outbox.refused, poison, "no")
    assert ledger.call(reopen.reopen, "r1", 0, 0, cause="lost")
    assert run.group(0)["losses"] == 1  # so that a group that can never start ends some day
    started = [c.key for c in ledger.call(outbox.claim)]
    assert "run/r1/b000000/g0~1" in started
    (row,) = run.rows(
        "SELECT last_error, done_at IS NOT NULL AS done FROM outbox WHERE id = %s", poison
    )
    assert row == {"last_error": "superseded; before: no", "done": True}


def test_the_commands_of_one_workflow_go_one_by_one_in_order(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    workflow = "run/r1/b000000/g0~0"

    def tell(tx: Tx) -> None:
        for attempt in (0, 1):
            key = f"{workflow}/s0.a{attempt}"
            outbox.add(tx, "r1", "cancel_sample", [(key, {"workflow_id": workflow})])

    ledger.call(tell)
    order = []
    while due := ledger.call(outbox.claim):
        order.append([c.key.rpartition("/")[2] for c in due])
        ledger.call(outbox.done, [c.id for c in due])
    assert order == [["g0~0", "g1~0", "g2~0", "g3~0"], ["s0.a0"], ["s0.a1"]]


def test_a_claim_out_of_very_many_stays_within_the_time_of_a_statement(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.do(
        "INSERT INTO outbox(run_id, kind, key, payload) SELECT 'r1', 'cancel_sample', 'k' || i, "
        "jsonb_build_object('workflow_id', 'w' || i / 2) FROM generate_series(1, 20000) i"
    )
    for _ in range(2):
        found = ledger.call(outbox.claim)
        assert len({c.payload["workflow_id"] for c in found}) == len(found) == 100
        ledger.call(outbox.done, [c.id for c in found])


def test_relays_that_claim_together_share_the_commands(ledger: Ledger) -> None:
    config = configuration(tasks={"batch_size": 16}, schedule={"order": "deadline"})
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    together = threading.Barrier(3)

    def relay() -> list[Command]:
        with ledger.transaction() as tx:
            together.wait(20)
            mine = outbox.claim(tx, 8)
            together.wait(20)  # all have claimed before anyone commits
        return mine

    with ThreadPoolExecutor(3) as pool:
        claims = [future.result() for future in [pool.submit(relay) for _ in range(3)]]
    ids = [c.id for claim in claims for c in claim]
    assert len(ids) == len(set(ids)) == 24


def test_the_start_of_a_generation_that_is_over_is_not_delivered(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    ledger.call(runs.close, "r1", run.epoch, "closed")
    kinds = [c.kind for c in ledger.call(outbox.claim)]
    assert kinds == ["close_group"] * 4
    run.take_over()
    run.hand_over()
    started = [c.key for c in ledger.call(outbox.claim) if c.kind == "start_group"]
    assert started == [f"run/r1/b00000{g // 2}/g{g}~1" for g in range(4)]


def test_a_publication_that_is_over_is_not_delivered(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    assert "publish" not in {c.kind for c in ledger.call(outbox.claim)}  # version 0 is served
    for group in (0, 1):
        run.complete(group)
    run.planned()
    run.apply()
    run.record_weights(1)
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    due = [c for c in ledger.call(outbox.claim) if c.kind == "publish"]
    assert [c.payload["version"] for c in due] == [1]
    ledger.call(outbox.done, [c.id for c in due])
    # A trainer that starts again while engines load asks again: Temporal may have lost it.
    assert ledger.call(versions.publish, "r1", run.epoch, 1)
    assert [c.kind for c in ledger.call(outbox.claim) if c.kind == "publish"] == ["publish"]


def test_done_commands_are_purged_but_for_starts_that_have_not_begun(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    ledger.call(outbox.done, [c.id for c in ledger.call(outbox.claim)])
    run.do("UPDATE groups SET begun_at = now() WHERE group_id < 2")
    assert ledger.call(outbox.purge, older_s=3600) == 0
    assert ledger.call(outbox.purge, older_s=-1) == 3
    assert [row["key"] for row in run.commands("start_group")] == [
        "run/r1/b000001/g2~0",
        "run/r1/b000001/g3~0",
    ]
