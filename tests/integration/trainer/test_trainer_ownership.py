"""Who may train a run, and what ends it from outside: zombies, leases, other data, outages."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from psycopg import conninfo

from domain import holders
from domain.errors import Fenced
from domain.services import Services
from storage import runs
from storage.database import Ledger
from tests.outage import Proxy
from tests.playing import Fleet, configuration
from tests.trained import (
    History,
    configuration_without_files,
    create,
    history,
    stop_at,
    train,
)
from trainer import consumer
from trainer.lease import Lease


def test_a_zombie_is_fenced_and_leaves_no_trace(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path, steps=20))
    lost: list[int] = []

    def lose() -> bool:
        found = ledger.call(runs.read, run)
        if found.next_step >= 2 and not lost:
            lost.append(ledger.call(runs.take_over, run, "other:1", lease_s=30, force=True))
        return fleet.broken()

    with Fleet(around, tmp_path / "engine") as fleet, pytest.raises(Fenced):
        train(run, around, fleet, stop=lose)
    found = ledger.call(runs.read, run)
    assert (found.state, found.epoch, found.next_step) == ("running", 2, 2)
    assert len(history(ledger, run)) == 2


def test_the_lease_thread_notices_a_takeover(ledger_url: str, ledger: Ledger, name: str) -> None:
    folder = Path("/nonexistent")
    run = create(ledger, configuration_without_files(name, folder))
    epoch = ledger.call(runs.take_over, run, "a:1", lease_s=0.3)
    with Lease(ledger, run, epoch, lease_s=0.3) as held:
        held.check()
        ledger.call(runs.take_over, run, "b:1", lease_s=30, force=True)
        held._thread.join(10)
        with pytest.raises(Fenced):
            held.check()


def test_a_dead_holder_of_this_host_is_recognised() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert holders.is_gone(f"{socket.gethostname()}:{child.pid}")
    assert not holders.is_gone(f"{socket.gethostname()}:{os.getpid()}")
    assert not holders.is_gone(f"elsewhere:{child.pid}")


def test_other_data_is_refused_on_resume(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=stop_at(ledger, run, 1, fleet)) == "closed"
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text(tasks.read_text().replace("007=", "008="))
        assert train(run, around, fleet) == "failed"
    failure = ledger.call(runs.read, run).failure
    assert failure is not None
    assert failure.startswith("DataChanged: the data changed since this run began")


def test_a_run_that_is_failed_from_outside_ends_with_that_failure(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))

    def fail() -> bool:
        if ledger.call(runs.read, run).next_step == 2:
            ledger.call(runs.fail_source, run, "task t4 answered for t5")
        return fleet.broken()

    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=fail) == "failed"
        found = ledger.call(runs.read, run)
        assert (found.failure, found.next_step) == ("SourceBroken: task t4 answered for t5", 2)
        assert ledger.call(runs.holder, run) is None
        assert train(run, around, fleet) == "finished"


def test_engines_that_never_serve_fail_the_run_after_the_limit(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine", serves=False) as fleet:
        assert train(run, around, fleet, patience_s=1.0) == "failed"
    failure = ledger.call(runs.read, run).failure
    assert failure is not None
    assert "version 0" in failure
    assert "was not served within 1 s" in failure


def test_rollouts_that_nobody_begins_fail_the_run_after_the_limit(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "LOOK_EVERY_S", 0.5)
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine", plays=False) as fleet:
        assert train(run, around, fleet, patience_s=2.0) == "failed"
    failure = ledger.call(runs.read, run).failure
    assert failure is not None
    assert "nothing has moved for 2 s (schedule.max_outage)" in failure
    assert "commands for Temporal are not delivered: no ledger worker leads" in failure
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet) == "finished"


@pytest.mark.parametrize("victim", ["postgres", "s3"])
def test_an_outage_shorter_than_the_limit_only_stalls(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, straight: History, victim: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    address = urlsplit(around.s3_endpoint)
    database = conninfo.conninfo_to_dict(around.database_url)
    host, port = (
        (str(database["host"]), int(str(database["port"])))
        if victim == "postgres"
        else (str(address.hostname), int(address.port or 80))
    )
    with Proxy(host, port) as proxy, Fleet(around, tmp_path / "engine") as fleet:
        cut: list[threading.Timer] = []
        services = around.model_copy(
            update={
                "database_url": conninfo.make_conninfo(
                    around.database_url, host="127.0.0.1", port=proxy.port
                )
                if victim == "postgres"
                else around.database_url,
                "s3_endpoint": f"http://127.0.0.1:{proxy.port}"
                if victim == "s3"
                else around.s3_endpoint,
            }
        )

        def interrupt() -> bool:
            if not cut and ledger.call(runs.read, run).next_step == 2:
                proxy.cut()
                cut.append(threading.Timer(2.0, proxy.mend))
                cut[0].start()
            return fleet.broken()

        assert train(run, services, fleet, stop=interrupt) == "finished"
        assert cut
    assert history(ledger, run) == straight


def test_a_store_that_stays_away_fails_the_run_with_the_cause(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    nowhere = around.model_copy(update={"s3_endpoint": "http://127.0.0.1:9"})
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, nowhere, fleet, patience_s=0.5) == "failed"
        failure = ledger.call(runs.read, run).failure
        assert failure is not None
        assert "http://127.0.0.1:9" in failure
        assert train(run, around, fleet) == "finished"
