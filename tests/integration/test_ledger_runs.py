"""A run's life in the ledger: creation, fencing, leases, close, failure, resume."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from domain.errors import (
    Fenced,
    LedgerError,
    RunExists,
    RunHeld,
    RunNotFound,
    RunStopped,
    SourceBroken,
)
from storage import checkpoints, plans, runs, steps, tasks, versions
from storage.database import Ledger, Tx
from tests.outage import Proxy
from tests.rehearsal import Rehearsal, configuration, digest


def test_a_run_comes_back_as_it_was_written(ledger: Ledger) -> None:
    config = configuration(
        groups={"size": 4, "oversample": 1},
        trainer={"importance": [0.5, 2.0], "truncation_by_cause": {"turns": "zero"}},
    )
    ledger.call(runs.create, config, world={"threads": 1})
    run = ledger.call(runs.read, "r1")
    assert run.config == config
    assert run.world == {"threads": 1}
    assert (run.state, run.version, run.next_step, run.durable_step) == ("creating", 0, 0, None)


def test_a_name_is_taken_once(ledger: Ledger) -> None:
    ledger.call(runs.create, configuration(), world={})
    with pytest.raises(RunExists, match="rollbook resume r1"):
        ledger.call(runs.create, configuration(), world={})


def test_a_misspelt_run_names_its_neighbours(ledger: Ledger) -> None:
    with pytest.raises(RunNotFound, match="no runs yet"):
        ledger.call(runs.read, "countdown")
    ledger.call(runs.create, configuration(name="countdown-1"), world={})
    with pytest.raises(RunNotFound, match="there is countdown-1"):
        ledger.call(runs.read, "countdwn-1")


def test_each_run_has_a_partition_of_segments(ledger: Ledger) -> None:
    for name in ("a", "b.2-with_everything"):
        ledger.call(runs.create, configuration(name=name), world={})
    with ledger.transaction() as tx:
        bounds = tx.execute(
            "SELECT pg_get_expr(c.relpartbound, c.oid) AS bound FROM pg_class c JOIN pg_inherits i "
            "ON i.inhrelid = c.oid WHERE i.inhparent = 'segments'::regclass ORDER BY 1"
        ).fetchall()
    assert [row["bound"] for row in bounds] == [
        "DEFAULT",
        "FOR VALUES IN ('a')",
        "FOR VALUES IN ('b.2-with_everything')",
    ]


def test_the_world_is_fixed_once_the_run_has_begun(ledger: Ledger) -> None:
    ledger.call(runs.create, configuration(), world={})
    epoch = ledger.call(runs.take_over, "r1", "host:1", lease_s=30)
    ledger.call(runs.set_world, "r1", epoch, {"threads": 2})
    assert ledger.call(runs.read, "r1").world == {"threads": 2}
    run = Rehearsal(ledger, configuration(name="r2")).begin()
    with pytest.raises(LedgerError, match="fixed when it was created"):
        ledger.call(runs.set_world, "r2", run.epoch, {"threads": 3})


def test_a_live_lease_keeps_others_out(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    with pytest.raises(RunHeld, match=r"host:1.*--force"):
        ledger.call(runs.take_over, "r1", "host:2", lease_s=30)
    run.do("UPDATE runs SET trainer_lease_until = now() - interval '1 second'")
    assert ledger.call(runs.take_over, "r1", "host:2", lease_s=30) == run.epoch + 1
    ledger.call(runs.renew, "r1", run.epoch + 1, lease_s=60)
    assert ledger.call(runs.take_over, "r1", "host:3", lease_s=30, force=True) == run.epoch + 2
    with pytest.raises(Fenced):
        ledger.call(runs.renew, "r1", run.epoch + 1, lease_s=60)


def test_every_transaction_of_a_zombie_is_refused(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    for group in (2, 3):
        run.complete(group)
    zombie = run.epoch
    run.take_over("host:2")
    result: dict[str, Any] = {"updated": True, "weights_sha256": digest(1)}
    where: dict[str, Any] = {
        "prefix": "p",
        "manifest_sha256": digest("m"),
        "bytes": 1,
        "data_position": {},
        "rng": {},
        "world": {},
    }
    calls: list[Callable[[Tx], object]] = [
        lambda tx: plans.plan(tx, "r1", zombie, 0, 1),
        lambda tx: steps.apply(tx, "r1", zombie, 0, cause=None, metrics={}, record={}, **result),
        lambda tx: steps.verify_replay(tx, "r1", zombie, 0, **result),
        lambda tx: tasks.hand_over(tx, "r1", zombie, 0),
        lambda tx: tasks.register_batch(tx, "r1", zombie, 0, 2, run.tasks(2), {}),
        lambda tx: tasks.end_of_data(tx, "r1", zombie, 0, 9),
        lambda tx: checkpoints.record(tx, "r1", zombie, step=1, version=1, **where),
        lambda tx: checkpoints.create_first(
            tx,
            "r1",
            zombie,
            weights_sha256=digest(0),
            manifest_key="k",
            weights_bytes=1,
            probe=None,
            **where,
        ),
        lambda tx: versions.record_weights(
            tx, "r1", zombie, 1, manifest_key="k", bytes=1, probe=None
        ),
        lambda tx: versions.publish(tx, "r1", zombie, 1),
        lambda tx: runs.renew(tx, "r1", zombie, lease_s=1),
        lambda tx: runs.close(tx, "r1", zombie, "closed"),
        lambda tx: runs.set_world(tx, "r1", zombie, {}),
    ]
    for call in calls:
        with pytest.raises(Fenced, match=f"this process has epoch {zombie}"):
            ledger.call(call)
    assert run.planned() == [2, 3]


def test_close_keeps_finished_members_and_resume_runs_only_the_missing(ledger: Ledger) -> None:
    config = configuration(groups={"size": 4, "oversample": 1})
    run = Rehearsal(ledger, config).begin()
    run.hand_over()
    run.start(0)
    for sample in (0, 3, 4):
        run.end(0, sample)  # sample 1 and 2 still run
    run.complete(1)
    assert ledger.call(runs.close, "r1", run.epoch, "closed") == 3
    assert run.now().state == "closed"
    group = run.group(0)
    assert (group["state"], group["gen"], group["workflow_id"]) == ("registered", 1, None)
    assert run.states()[1] == "queue"
    told = run.commands("close_group")
    assert [row["key"] for row in told] == [
        "run/r1/b000000/g0~0",
        "run/r1/b000001/g2~0",
        "run/r1/b000001/g3~0",
    ]
    with pytest.raises(RunStopped, match="closed"):
        run.plan()
    run.take_over("host:2")
    assert run.now().state == "running"
    assert run.hand_over().submitted == 3
    start = run.commands("start_group")[-3]
    assert start["key"] == "run/r1/b000000/g0~1"
    assert start["payload"]["kept"] == 3
    assert start["payload"]["samples"] == [[1, 1]]
    fresh = run.rows(
        "SELECT state, status, cancel_cause, counts_as_failure FROM attempts "
        "WHERE group_id = 0 AND sample IN (1, 2) ORDER BY sample, attempt"
    )
    assert [tuple(row.values()) for row in fresh] == [
        ("running", None, "close", False),
        ("submitted", None, None, False),
        ("running", None, "close", False),
    ]
    run.complete(0)
    assert run.planned() == [0, 1]


def test_nothing_becomes_cancelled_by_a_close(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.train(1)
    before = run.value("SELECT owed FROM balance")
    for _ in range(3):
        ledger.call(runs.close, "r1", run.epoch, "closed")
        run.take_over()
        run.hand_over()
    balance = run.rows("SELECT owed, cancelled FROM balance")
    assert balance == [{"owed": before, "cancelled": 0}]


def test_resume_adopts_running_groups_or_cancels_them_as_asked(ledger: Ledger) -> None:
    for mode, gen in (("adopt", 0), ("cancel", 1)):
        config = configuration(name=f"r-{mode}", schedule={"on_reopen": mode})
        run = Rehearsal(ledger, config).begin()
        run.hand_over()
        run.start(0)
        run.take_over("host:2")
        run.hand_over()
        group = run.group(0)
        assert (group["state"], group["gen"]) == ("submitted", gen)


def test_a_broken_source_stops_the_run_and_the_trainers_next_poll_raises_it(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    ledger.call(runs.fail_source, "r1", "task t0.1 came back for t0.0")
    ledger.call(runs.fail_source, "r1", "a later one")
    assert set(run.states().values()) == {"registered"}
    for poll in (run.plan, run.hand_over):
        with pytest.raises(SourceBroken, match=r"^task t0\.1 came back"):
            poll()
    ledger.call(runs.close, "r1", run.epoch, "closed")
    assert run.now().state == "failed"
    run.take_over()
    assert (run.now().state, run.now().failure) == ("running", None)


def test_a_run_that_never_began_is_created_again(ledger: Ledger) -> None:
    ledger.call(runs.create, configuration(), world={})
    epoch = ledger.call(runs.take_over, "r1", "host:1", lease_s=30)
    ledger.call(runs.close, "r1", epoch, "closed")
    assert ledger.call(runs.read, "r1").state == "creating"
    epoch = ledger.call(runs.take_over, "r1", "host:1", lease_s=30)
    ledger.call(runs.close, "r1", epoch, "failed", "no such folder")
    assert ledger.call(runs.read, "r1").state == "failed"
    ledger.call(runs.take_over, "r1", "host:1", lease_s=30)
    assert ledger.call(runs.read, "r1").state == "creating"


def test_a_finished_run_stays_finished(ledger: Ledger) -> None:
    run = Rehearsal(ledger, configuration(steps=1)).begin()
    run.train(1)
    run.checkpoint()
    ledger.call(runs.close, "r1", run.epoch, "finished")
    run.take_over()
    assert run.now().state == "finished"
    with pytest.raises(LedgerError, match="only a running run becomes paused"):
        ledger.call(runs.pause, "r1")


def test_both_ends_notice_a_peer_that_is_gone_without_a_word(ledger: Ledger) -> None:
    with ledger.transaction() as tx:
        with socket.socket(fileno=os.dup(tx.fileno())) as line:
            ours = [
                line.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                    socket.TCP_USER_TIMEOUT,
                )
            ]
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
        theirs = [tx.execute(f"SHOW {name}").fetchone() for name in names]
    assert ours == [10, 5, 4, 30_000]
    assert [int(row[name]) for row, name in zip(theirs, names, strict=True) if row] == [10, 5, 4]


def test_calls_are_retried_while_patience_lasts(
    ledger_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    patient = Ledger.open(ledger_url, pool=2, patience_s=20)
    tried: list[int] = []

    def killed_twice(tx: Tx) -> str:
        tried.append(1)
        if len(tried) < 3:
            tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return "done"

    try:
        assert patient.call(killed_twice) == "done"
        assert len(tried) == 3
        told = [m for m in caplog.messages if "killed_twice" in m and "terminat" in m]
        assert len(told) == 1  # an outage is named, not once a try
    finally:
        patient.close()
    hasty = Ledger.open(ledger_url, pool=2)
    tried.clear()
    try:
        with pytest.raises(psycopg.OperationalError):
            hasty.call(killed_twice)
        assert len(tried) == 1
    finally:
        hasty.close()


@pytest.mark.slow
def test_the_end_of_an_outage_is_noticed_within_seconds_however_long_it_lasted(
    ledger_url: str,
) -> None:
    place = conninfo.conninfo_to_dict(ledger_url)
    with Proxy(str(place["host"]), int(str(place["port"]))) as proxy:
        url = conninfo.make_conninfo(ledger_url, host="127.0.0.1", port=proxy.port)
        ledger = Ledger.open(url, pool=2, patience_s=100)
        proxy.cut()
        mended: list[float] = []

        def mend() -> None:
            proxy.mend()
            mended.append(time.monotonic())

        threading.Timer(34, mend).start()  # just after the pool would have tried for the sixth time
        assert ledger.call(lambda tx: 3) == 3
        assert time.monotonic() - mended[0] < 15
        ledger.close()


async def test_run_never_blocks_the_loop(ledger: Ledger) -> None:
    release = threading.Event()

    def blocks(tx: Tx) -> int:
        assert release.wait(20)
        return 7

    waiting = asyncio.ensure_future(ledger.run(blocks))
    assert await ledger.run(lambda tx: 3) == 3
    assert not waiting.done()
    release.set()
    assert await waiting == 7
