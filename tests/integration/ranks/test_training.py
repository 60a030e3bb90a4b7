"""Two trainer processes train one run, against a real ledger and object store."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from domain.errors import ConfigError
from domain.rollouts import Status, Task
from domain.services import Services
from storage import checkpoints, manifests, plans, runs
from storage.attempts import Ending
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.launched_ranks import (
    TRAIN_ONCE,
    create,
    history,
    reader,
    started,
    stored,
    train,
)
from tests.playing import Answer, Fleet, scripted
from trainer import loop, lora
from trainer.creation import Workshop
from trainer.model import weights_digest

KINDS = ("weights", "optimizer")
BROKEN_RANK = TRAIN_ONCE.with_name("broken_rank.py")


def test_two_ranks_train_a_run_to_its_end(around: Services, ledger: Ledger, tmp_path: Path) -> None:
    name = create(ledger, tmp_path / "a", steps=3)
    with Fleet(around, tmp_path / "engine"):
        objects = stored(train(name, around))
    kinds = {(rank, key.split("/")[0]) for key, rank in objects.items()}
    assert kinds == {("0", "models"), ("0", "weights"), ("0", "checkpoints")}
    found = ledger.call(runs.read, name)
    assert (found.state, found.version, found.durable_step) == ("finished", 3, 3)
    assert found.world["shares"] == 2
    plan = ledger.call(plans.read, name, 0)
    assert plan is not None
    assert [row.group for row in plan.rows] == [0, 1, 2, 3]  # of both shares' first batches
    with ledger.transaction() as tx:
        records = tx.execute(
            "SELECT share, record, waited_s FROM step_shares WHERE run_id = %s AND step = 1 "
            "ORDER BY share",
            (name,),
        ).fetchall()
        metrics = tx.execute(
            "SELECT metrics FROM steps WHERE run_id = %s AND step = 1", (name,)
        ).fetchone()
    assert [row["record"]["groups"] for row in records] == [4, 2]  # of the step, of the share
    assert records[0]["waited_s"] > 0  # rank 0 publishes
    # The other one waited beside it, not inside a collective.
    assert records[1]["record"]["waited_for"].get("publish", 0) > 0
    assert metrics is not None
    assert metrics["metrics"]["status/completed"] == 1.0
    alone = loop.run(name, around, holder="elsewhere:1", patience_s=20)
    assert alone == "finished"  # nothing is left to train, so nobody else is needed


def test_two_ranks_with_divided_weights_store_each_slice_once(
    around: Services, ledger: Ledger, tmp_path: Path
) -> None:
    name = create(ledger, tmp_path / "a", steps=2, trainer={"parallel": "fsdp"})
    with Fleet(around, tmp_path / "engine"):
        objects = stored(train(name, around))
    for key, rank in objects.items():
        divided = key.rpartition("/")[2].partition("-of-2")
        assert rank == (divided[0][-1] if divided[1] else "0"), key
    found = ledger.call(runs.read, name)
    assert (found.state, found.version, found.durable_step) == ("finished", 2, 2)
    row = ledger.call(checkpoints.at, name, 2)
    assert row is not None
    store = ObjectStore(around)
    files = manifests.read(store, f"{row.prefix}/manifest.json").files
    slices = [f"{kind}-{part}-of-2.safetensors" for kind in KINDS for part in range(2)]
    assert sorted(files) == sorted([*slices, "state.json"])
    for kind in KINDS:  # neither rank stored more than its half
        sizes = [files[f"{kind}-{part}-of-2.safetensors"].bytes for part in range(2)]
        assert max(sizes) < 1.1 * min(sizes)
    # One process reads what two have stored, and finds the weights that were booked and published.
    workshop = Workshop(ledger, store, tmp_path, reader(), name, found.epoch)
    learner, state = workshop.restore(found)
    digest = weights_digest(learner.policy.weights())
    with ledger.transaction() as tx:
        booked = tx.execute(
            "SELECT s.weights_sha256 = %(d)s AND v.weights_sha256 = %(d)s AS same FROM steps s "
            "JOIN policy_versions v USING (run_id) "
            "WHERE s.run_id = %(r)s AND s.step = 1 AND v.version = 2",
            {"d": digest, "r": name},
        ).fetchone()
    assert (state.weights_sha256, booked) == (digest, {"same": True})


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_of_two_ranks_is_audited_by_two_processes(
    around: Services, ledger: Ledger, tmp_path: Path, parallel: str
) -> None:
    name = create(ledger, tmp_path / "a", steps=3, trainer={"parallel": parallel})
    with Fleet(around, tmp_path / "engine"):
        train(name, around)

    def audit(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "rollbook", "audit", name, *arguments],
            env=os.environ | around.environment() | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr[-4000:]

    code, told = audit()
    assert (code, told.count(": exact (4 groups")) == (0, 3), told
    with ledger.transaction() as tx:
        tx.execute("SET LOCAL session_replication_role = replica")
        tx.execute(
            "UPDATE attempts SET reward = reward + 1 WHERE run_id = %s AND member AND sample = 0 "
            "AND group_id = (SELECT group_id FROM queue WHERE run_id = %s AND step = 1 AND share = 1 "
            "ORDER BY pos LIMIT 1)",
            (name, name),
        )
    code, told = audit("1")
    assert code == 1, told
    assert "DIFFERS" in told
    assert "rewards and statuses of group" in told


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_adapter_of_two_ranks_is_published_and_repeated_bit_for_bit(
    around: Services, ledger: Ledger, tmp_path: Path, parallel: str
) -> None:
    sections = {"trainer": {"parallel": parallel}, "model": {"lora": {"rank": 3, "alpha": 6}}}
    straight, broken = (create(ledger, tmp_path / n, **sections) for n in "ab")
    files: dict[str, dict[str, Tensor]] = {}

    def keep(folder: Path, manifest: manifests.Manifest) -> None:
        files[folder.name] = load_file(folder / lora.WEIGHTS)
        assert weights_digest(files[folder.name]).hex() == manifest.sha256

    with Fleet(around, tmp_path / "engine", on_load=keep):
        train(straight, around)
        with started(broken, around, FAILPOINT="apply_done:3") as process:
            output, _ = process.communicate(timeout=120)
            assert process.returncode != 0, output[-4000:]
        train(broken, around)
    assert history(ledger, broken) == history(ledger, straight)
    assert ledger.call(runs.read, broken).epoch == 2
    first, last = (files[f"{straight}-{version}"] for version in (0, 4))
    assert last.keys() == files[f"{broken}-4"].keys()
    assert any(not torch.equal(first[name], last[name]) for name in last)
    assert all(torch.equal(files[f"{broken}-4"][name], last[name]) for name in last)
    row = ledger.call(checkpoints.at, straight, 4)
    assert row is not None
    found = manifests.read(ObjectStore(around), f"{row.prefix}/manifest.json")
    assert found.tensors is not None
    assert found.tensors.keys() == last.keys()  # none of the frozen weights


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_full_engine_may_hold_a_version_for_longer_than_a_collective_may_last(
    around: Services, ledger: Ledger, tmp_path: Path, parallel: str
) -> None:
    name = create(ledger, tmp_path / "a", trainer={"parallel": parallel})
    with Fleet(around, tmp_path / "engine", slots=1) as fleet:
        fleet.held = {3, 6}  # of the first step, and of the one that is sampled ahead
        # A collective lasts 16 s at most.
        with started(name, around, PATIENCE_S="6", LEASE_S="2") as process:
            while not _runs_with_version_0(ledger, name, 6):
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            fleet.release(3)
            while not (held_by := _held_by(ledger, name)):
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            assert "g6 " in held_by
            time.sleep(20)
            assert process.poll() is None, process.communicate()
            assert ledger.call(runs.read, name).next_step == 1
            fleet.release(6)
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-4000:]
    found = ledger.call(runs.read, name)
    assert (found.state, found.version, found.epoch) == ("finished", 4, 1)
    with ledger.transaction() as tx:
        waits = tx.execute(
            "SELECT share, (record->'waited_for'->>'resident_limit')::float8 AS s FROM step_shares "
            "WHERE run_id = %s AND step = 1 ORDER BY share",
            (name,),
        ).fetchall()
    assert [row["share"] for row in waits] == [0, 1]
    assert all(row["s"] > 10 for row in waits)  # asleep, between two exchanges


def _runs_with_version_0(ledger: Ledger, name: str, group: int) -> bool:
    with ledger.transaction() as tx:
        query = (
            "SELECT 1 FROM attempts WHERE run_id = %s AND group_id = %s AND state = 'running' "
            "AND pinned_version = 0"
        )
        return tx.execute(query, (name, group)).fetchone() is not None


def _held_by(ledger: Ledger, name: str) -> str | None:
    with ledger.transaction() as tx:
        row = tx.execute(
            "SELECT max(held_by) AS held_by FROM policy_versions WHERE run_id = %s", (name,)
        ).fetchone()
    return None if row is None else row["held_by"]


def flat(task: Task, sample: int, version: int) -> Answer:
    """The tasks of share 1 (every other pair) earn the same whatever is said."""
    segment, ending = scripted(task, sample, version)
    return segment, replace(ending, reward=0.5) if of_share_1(task) else ending


def truncated(task: Task, sample: int, version: int) -> Answer:
    """Every rollout of share 1 runs out of tokens, and takes no loss."""
    segment, ending = scripted(task, sample, version)
    cut = Ending(status=Status.TRUNCATED, cause="tokens")
    return segment, cut if of_share_1(task) else ending


def of_share_1(task: Task) -> bool:
    return int(task.id[1:]) // 2 % 2 == 1


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("answer", [flat, truncated])
def test_a_rank_with_nothing_to_learn_makes_the_same_collectives_and_a_pause_holds_all(
    around: Services, ledger: Ledger, tmp_path: Path, answer: Any, parallel: str
) -> None:
    tasks = {"shuffle": False}
    name = create(ledger, tmp_path / "a", tasks=tasks, trainer={"parallel": parallel})
    with (
        Fleet(around, tmp_path / "engine", answer=answer),
        started(name, around) as process,
    ):
        while ledger.call(runs.read, name).next_step < 1:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        ledger.call(runs.pause, name)
        time.sleep(1.0)  # a step that was planned by then may still be applied
        held = ledger.call(runs.read, name).next_step
        time.sleep(2.0)  # for what must not happen meanwhile
        assert ledger.call(runs.read, name).next_step == held < 4
        ledger.call(runs.unpause, name)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output[-4000:]
    with ledger.transaction() as tx:
        shares = tx.execute(
            "SELECT q.share, count(DISTINCT a.reward) > 1 AS differ, count(*) > 8 AS many FROM queue q "
            "JOIN attempts a USING (run_id, group_id) WHERE q.run_id = %s AND a.member "
            "GROUP BY q.share ORDER BY q.share",
            (name,),
        ).fetchall()
        found = tx.execute(
            "SELECT count(*) FILTER (WHERE updated) AS moved, bool_or((metrics->>'waited/paused')"
            "::float8 > 1) AS paused FROM steps WHERE run_id = %s",
            (name,),
        ).fetchone()
    assert [(row["share"], row["differ"], row["many"]) for row in shares] == [
        (0, True, True),
        (1, False, True),
    ]
    assert found == {"moved": 4, "paused": True}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_two_readers_of_a_share_train_the_plans_of_one(
    around: Services, ledger: Ledger, tmp_path: Path, ranks: int
) -> None:
    """A mesh of 1 x 2 and one of 2 x 2: shares by readers."""
    trainer = {"rows": 1, "ranks": ranks // 2}
    one = create(ledger, tmp_path / "a", trainer=trainer)
    two = create(ledger, tmp_path / "b", trainer=trainer | {"ranks": ranks, "readers": 2})
    with Fleet(around, tmp_path / "engine"):
        train(one, around, ranks=ranks // 2)
        train(two, around, ranks=ranks)
    assert ledger.call(runs.read, two).shares == ranks // 2
    with ledger.transaction() as tx:
        found = [
            tx.execute(
                "SELECT s.step, s.groups, (s.metrics->>'loss')::float8 AS loss, "
                "(s.metrics->>'grad_norm')::float8 AS norm, ARRAY(SELECT (share, group_id) FROM "
                "queue q WHERE (q.run_id, q.step) = (s.run_id, s.step) ORDER BY share, pos)::text "
                "AS plan FROM steps s WHERE run_id = %s ORDER BY step",
                (name,),
            ).fetchall()
            for name in (one, two)
        ]
    for alone, shared in zip(*found, strict=True):
        for key in ("loss", "norm"):
            assert shared.pop(key) == pytest.approx(alone.pop(key), rel=1e-3, abs=1e-5)
        assert shared == alone


def test_a_run_of_two_shares_refuses_a_single_trainer(
    around: Services, ledger: Ledger, tmp_path: Path
) -> None:
    name = create(ledger, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"2 shares .* 1 trainer .* --nproc-per-node 2"):
        loop.run(name, around, holder="elsewhere:1", patience_s=20)
    found = ledger.call(runs.read, name)
    assert (found.state, found.epoch) == ("creating", 0)  # nobody took it over


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param("optimizer", 1, id="compute"),
        pytest.param("plan_mid", 1, id="plan", marks=pytest.mark.slow),
        pytest.param("mid_step", 0, id="compute on rank 0", marks=pytest.mark.slow),
        pytest.param("apply_mid", 0, id="apply", marks=pytest.mark.slow),
        pytest.param("ck_mid", 0, id="checkpoint", marks=pytest.mark.slow),
        pytest.param("p_uploaded", 0, id="publish", marks=pytest.mark.slow),
        pytest.param("p_served", 1, id="outside every vote", marks=pytest.mark.slow),
    ],
)
def test_one_failure_raises_the_same_error_on_every_rank_and_none_is_left_waiting(
    around: Services, ledger: Ledger, tmp_path: Path, point: str, rank: int
) -> None:
    name = create(ledger, tmp_path / "a")
    with (
        Fleet(around, tmp_path / "engine"),
        started(name, around, program=BROKEN_RANK, BREAK=f"{point}:{rank}") as process,
    ):
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-4000:]
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    (broke,) = [line for line in told if "broke" in line]
    for other in range(2):
        raised, ended = [line for line in told if line["rank"] == other and "broke" not in line]
        assert raised["raised"] == ["DataChanged", "somebody has exchanged the data"]
        assert ended["state"] == "failed"
        assert ended["at"] - broke["at"] < 10
    found = ledger.call(runs.read, name)
    assert (found.state, found.failure) == (
        "failed",
        "DataChanged: somebody has exchanged the data",
    )
