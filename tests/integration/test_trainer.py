"""The trainer process against a real ledger and object store, with the rest of the world played."""

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from psycopg import conninfo
from safetensors.torch import load_file

from domain import holders
from domain.config import RunConfig
from domain.errors import Fenced
from domain.failpoints import POINTS
from domain.services import Services
from storage import checkpoints, manifests, runs
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.outage import Proxy
from tests.playing import Fleet, configuration, constant
from trainer import loop
from trainer.lease import Lease
from trainer.model import weights_digest

TRAIN_ONCE = Path(__file__).parents[1] / "train_once.py"
History = list[tuple[Any, ...]]


@pytest.fixture
def around(ledger_url: str, ledger: Ledger, s3_services: Services) -> Services:
    """A fresh ledger and the session's object store."""
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(update={"database_url": ledger_url})


@pytest.fixture
def name() -> str:
    return f"t{secrets.token_hex(4)}"


def create(ledger: Ledger, config: RunConfig) -> str:
    ledger.call(runs.create, config, world={})
    return config.name


def train(name: str, services: Services, fleet: Fleet, **options: Any) -> str:
    settings: dict[str, Any] = {
        "holder": "elsewhere:1",
        "patience_s": 20,
        "stop": fleet.broken,
    } | options
    return loop.run(name, services, **settings)


def crash(name: str, services: Services, point: str) -> None:
    """Run a trainer process that must die at `point`."""
    ended = subprocess.run(
        [sys.executable, str(TRAIN_ONCE), name],
        env=os.environ | services.environment() | {"FAILPOINT": point, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 137, (point, ended.returncode, ended.stdout, ended.stderr[-3000:])


def history(ledger: Ledger, name: str) -> History:
    """What must be equal in every execution: plan, digest, update, loss and rate of each step."""
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT step, version_before, updated, groups, cause, weights_sha256, "
            "metrics->>'loss' AS loss, metrics->>'lr' AS lr, ARRAY(SELECT group_id FROM queue q "
            "WHERE (q.run_id, q.step) = (s.run_id, s.step) ORDER BY pos) AS plan "
            "FROM steps s WHERE run_id = %s ORDER BY step",
            (name,),
        ).fetchall()
    return [tuple(row.values()) for row in rows]


def stop_at(ledger: Ledger, name: str, step: int, fleet: Fleet) -> Callable[[], bool]:
    return lambda: fleet.broken() or ledger.call(runs.read, name).next_step >= step


@pytest.fixture(scope="module")
def remembered() -> dict[str, History]:
    return {}


@pytest.fixture
def straight(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, remembered: dict[str, History]
) -> History:
    """The history of an uninterrupted run of the default configuration."""
    if "default" not in remembered:
        run = create(ledger, configuration(f"{name}-s", tmp_path))
        with Fleet(around, tmp_path / "s") as fleet:
            assert train(run, around, fleet) == "finished"
        remembered["default"] = history(ledger, run)
    return remembered["default"]


def test_a_run_trains_to_its_end(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path, steps=5))
    digests: list[str] = []

    def load(folder: Path, manifest: Any) -> None:
        weights = load_file(folder / "model.safetensors")
        assert weights_digest(weights).hex() == manifest.sha256
        assert len(manifest.meta["probe"]["logprobs"]) == 4
        digests.append(manifest.sha256)

    with Fleet(around, tmp_path / "engine", on_load=load) as fleet:
        assert train(run, around, fleet) == "finished"
    found = ledger.call(runs.read, run)
    assert (found.version, found.next_step, found.durable_step) == (5, 5, 5)
    assert fleet.loaded == [0, 1, 2, 3, 4, 5]
    assert len(set(digests)) == 6
    with ledger.transaction() as tx:
        row = tx.execute(
            "SELECT s.metrics, h.record, h.waited_s FROM steps s JOIN step_shares h "
            "USING (run_id, step) WHERE run_id = %s AND step = 3",
            (run,),
        ).fetchone()
    assert row is not None
    told = {"loss", "grad_norm", "lr", "entropy", "mismatch/k3", "lag/max", "pack/fill"}
    assert told | {"latency/p90", "tokens_per_second", "publish_lag"} <= set(row["metrics"])
    record = row["record"]
    assert (record["updates"], record["groups"], record["optimizer_updates"]) == (4, 2, 1)
    assert record["resubmitted"]["stale"] == 0
    assert row["waited_s"] == record["waited"] > 0
    with Fleet(around, tmp_path / "again") as fleet:
        assert train(run, around, fleet) == "finished"


ONCE = {
    "c_uploaded": ["c_uploaded"],
    "ck_part": ["ck_part:5"],  # the first three are checkpoint 0
    "apply_done": ["apply_done:3"],
}
ALL = ONCE | {
    "c_row": ["c_row"],
    "c_served": ["c_served"],
    "resume_done": ["resume_done"],
    "restored": ["restored"],
    "replay_mid": ["apply_done:3", "replay_mid"],
    "h_mid": ["h_mid:2"],
    "h_done": ["h_done:2"],
    "plan_start": ["plan_start:3"],
    "plan_mid": ["plan_mid:2"],
    "plan_done": ["plan_done:3"],
    "mid_step": ["mid_step:2"],
    "optimizer": ["optimizer:3"],
    "apply_mid": ["apply_mid:2"],
    "ck_uploaded": ["ck_uploaded:2"],
    "ck_mid": ["ck_mid"],
    "ck_done": ["ck_done"],
    "p_uploaded": ["p_uploaded:2"],
    "p_loading": ["p_loading:2"],
    "p_served": ["p_served:2"],
    "close_mid": ["close_mid"],
    "close_done": ["close_done"],
}


def test_every_point_is_crashed_at() -> None:
    # Stale members need a run that falls behind: the ledger's own tests re-open those.
    assert set(ALL) == set(POINTS) - {"plan_reopen"}


@pytest.mark.parametrize(
    "point", [p if p in ONCE else pytest.param(p, marks=pytest.mark.slow) for p in ALL]
)
def test_a_run_that_died_goes_on_with_identical_weights(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, straight: History, point: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        for setting in ALL[point]:
            crash(run, around, setting)
        assert train(run, around, fleet) == "finished"
    assert history(ledger, run) == straight


def test_a_stopped_run_is_closed_with_a_checkpoint_and_goes_on_alike(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, straight: History
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=stop_at(ledger, run, 3, fleet)) == "closed"
        found = ledger.call(runs.read, run)
        assert (found.state, found.next_step, found.durable_step) == ("closed", 3, 3)
        assert train(run, around, fleet) == "finished"
    assert history(ledger, run) == straight


def test_a_batch_without_signal_moves_nothing(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path, trainer={"weight_decay": 0.1}))
    with Fleet(around, tmp_path / "engine", answer=constant) as fleet:
        assert train(run, around, fleet) == "finished"
    found = ledger.call(runs.read, run)
    assert (found.version, found.next_step) == (0, 4)
    assert fleet.loaded == [0]
    store = ObjectStore(around)

    def files(step: int) -> dict[str, str]:
        row = ledger.call(checkpoints.at, run, step)
        assert row is not None
        manifest = manifests.read(store, f"{row.prefix}/manifest.json")
        return {n: f.sha256 for n, f in manifest.files.items() if n.endswith(".safetensors")}

    assert files(4) == files(0)
    assert {(row[2], row[4]) for row in history(ledger, run)} == {(False, "no_usable_gradient")}


def test_an_empty_batch_is_recorded_and_the_next_one_trains(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        fleet.abandoned = {4, 5, 7}
        assert train(run, around, fleet) == "finished"
    assert [(row[2], row[3], row[4]) for row in history(ledger, run)] == [
        (True, 2, None),
        (True, 2, None),
        (False, 0, "empty"),
        (True, 1, None),
    ]


def test_a_run_whose_engines_disagree_with_the_trainer_is_paused(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Synchronous, so that every token is the trainer's own version's; the played ones are invented.
    schedule = {"ahead": 0, "max_lag": 0}
    run = create(ledger, configuration(name, tmp_path, schedule=schedule))
    paused: list[int] = []

    def look() -> bool:
        found = ledger.call(runs.read, run)
        if found.state == "paused":
            paused.append(found.next_step)
        return fleet.broken() or len(paused) > 3

    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=look) == "closed"
    assert set(paused) == {2}
    assert "trainer and engines disagree" in caplog.text


def test_too_many_empty_batches_fail_the_run_with_their_causes(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    config = configuration(name, tmp_path, schedule={"max_empty_batches": 1})
    run = create(ledger, config)
    with Fleet(around, tmp_path / "engine") as fleet:
        fleet.abandoned = set(range(2, 100))
        assert train(run, around, fleet) == "failed"
        failure = ledger.call(runs.read, run).failure
        assert failure is not None
        assert "empty" in failure
        fleet.abandoned = set()
        assert train(run, around, fleet) == "finished"


def damage(around: Services, ledger: Ledger, run: str, step: int) -> None:
    """Flip one byte of a checkpoint's weights, as a bad disk would."""
    row = ledger.call(checkpoints.at, run, step)
    assert row is not None
    store, key = ObjectStore(around), f"{row.prefix}/weights.safetensors"
    content = bytearray(store.get(key))
    content[-1] ^= 1
    store._s3.put_object(Bucket=store.bucket, Key=key, Body=bytes(content))


def test_a_damaged_checkpoint_is_not_loaded_but_an_older_one_and_the_plans_since(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    straight: History,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=stop_at(ledger, run, 3, fleet)) == "closed"
        damage(around, ledger, run, 3)
        assert train(run, around, fleet) == "finished"
    assert "checkpoint 3 of" in caplog.text
    assert history(ledger, run) == straight


def test_without_any_readable_checkpoint_the_run_fails_and_says_what_to_restore(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=stop_at(ledger, run, 1, fleet)) == "closed"
        damage(around, ledger, run, 0)
        damage(around, ledger, run, 1)
        assert train(run, around, fleet) == "failed"
    failure = ledger.call(runs.read, run).failure
    assert failure is not None
    assert "restore it in the object store" in failure
    assert f"object 'checkpoints/{run}/00000000/" in failure


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


def configuration_without_files(name: str, root: Path) -> RunConfig:
    return RunConfig.parse(
        {
            "name": name,
            "steps": 1,
            "root": str(root),
            "tasks": {"source": "a:b", "dataset": "none.jsonl"},
            "groups": {"timeout": 5.0},
            "model": {"tiny": {}},
        }
    )


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


def test_a_paused_run_waits_and_goes_on(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, straight: History
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    polls: list[int] = []

    def pause() -> bool:
        found = ledger.call(runs.read, run)
        if found.next_step == 2 and found.state == "running" and not polls:
            ledger.call(runs.pause, run)
        if found.state == "paused":
            polls.append(found.next_step)
            if len(polls) == 5:
                ledger.call(runs.unpause, run)
        return fleet.broken()

    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=pause) == "finished"
    assert set(polls) == {2}
    assert history(ledger, run) == straight


def test_kl_entropy_minibatches_and_sequences_train_and_resume_alike(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    settings = {
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "minibatches": 2,
        "loss": "gspo",
        "aggregation": "rollout-mean",
        "rows": 1,
        "schedule": "cosine",
        "warmup_steps": 2,
    }
    once = create(ledger, configuration(name, tmp_path, trainer=settings))
    with Fleet(around, tmp_path / "a") as fleet:
        assert train(once, around, fleet) == "finished"
    again = create(ledger, configuration(f"{name}-2", tmp_path, trainer=settings))
    with Fleet(around, tmp_path / "b") as fleet:
        for step in (1, 3):
            assert train(again, around, fleet, stop=stop_at(ledger, again, step, fleet)) == "closed"
        assert train(again, around, fleet) == "finished"
    assert history(ledger, again) == history(ledger, once)
    assert len({row[7] for row in history(ledger, once)}) > 1
    found = ledger.call(runs.read, once)
    assert found.version == 4
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT metrics FROM steps WHERE run_id = %s ORDER BY step", (once,)
        ).fetchall()
    assert {row["metrics"]["optimizer_updates"] for row in rows} == {2.0}
    assert rows[0]["metrics"]["kl"] >= 0
    assert rows[3]["metrics"]["kl"] > 0


def test_a_bfloat16_run_resumes_alike(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    model = {"dtype": "bfloat16"}
    runs_ = [create(ledger, configuration(f"{name}-{i}", tmp_path, model=model)) for i in range(2)]
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(runs_[0], around, fleet) == "finished"
        assert train(runs_[1], around, fleet, stop=stop_at(ledger, runs_[1], 1, fleet)) == "closed"
        assert train(runs_[1], around, fleet) == "finished"
    assert history(ledger, runs_[0]) == history(ledger, runs_[1])


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


def test_groups_are_trained_by_deadline_until_the_data_ends(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    config = configuration(
        name,
        tmp_path,
        steps=None,
        tasks={"batch_size": 12, "epochs": 1},
        schedule={"order": "deadline", "stale_policy": "wait", "sync_every": 2},
        checkpoint={"every": 3},
    )
    run = create(ledger, config)
    with Fleet(around, tmp_path / "engine") as fleet:
        assert train(run, around, fleet, stop=stop_at(ledger, run, 2, fleet)) == "closed"
        assert train(run, around, fleet) == "finished"
    rows = history(ledger, run)
    assert [row[3] for row in rows] == [12, 12, 12, 4]  # 40 tasks, each once; the short rest trains
    assert sorted(group for row in rows for group in row[8]) == list(range(40))
    assert fleet.loaded == [0, 2, 4]  # every second version


@pytest.mark.slow
def test_an_inexact_run_keeps_plans_and_publishes_durable_versions_only(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    config = configuration(name, tmp_path, trainer={"exact": "order"}, checkpoint={"every": 1})
    run = create(ledger, config)
    durable: list[bool] = []

    def load(folder: Path, manifest: Any) -> None:
        found = ledger.call(runs.read, run)
        durable.append(found.durable_step == found.next_step)

    with Fleet(around, tmp_path / "engine", on_load=load) as fleet:
        crash(run, around, "apply_done:2")
        assert train(run, around, fleet) == "finished"
    assert all(durable)
    assert ledger.call(runs.read, run).version == 4
