"""A run trains to its end, dies at any point, and goes on alike."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from domain.failpoints import POINTS
from domain.services import Services
from storage import checkpoints, manifests, runs
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration, constant
from tests.trained import ALL, ONCE, History, crash, create, damage, history, stop_at, train
from trainer.model import weights_digest


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


@pytest.mark.slow
def test_steps_that_moved_nothing_are_replayed_as_such(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    config = configuration(name, tmp_path, checkpoint={"every": 4})
    run = create(ledger, config)
    with Fleet(around, tmp_path / "engine", answer=constant) as fleet:
        fleet.abandoned = {2, 3}  # step 1 is empty, the others have no usable gradient
        crash(run, around, "apply_done:3")
        before = history(ledger, run)
        assert [row[4] for row in before] == ["no_usable_gradient", "empty", "no_usable_gradient"]
        assert train(run, around, fleet) == "finished"
    assert history(ledger, run)[:3] == before
    with ledger.transaction() as tx:
        rows = tx.execute("SELECT replays FROM steps WHERE run_id = %s ORDER BY step", (run,))
        assert [row["replays"] for row in rows.fetchall()] == [1, 1, 1, 0]


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
