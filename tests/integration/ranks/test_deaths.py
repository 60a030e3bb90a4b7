"""A rank dies: its world ends in time, and the next goes on to the same weights."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from domain.services import Services
from storage import fork, manifests, runs
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.launched_ranks import History, create, history, started, train
from tests.playing import Fleet


@pytest.mark.slow
@pytest.mark.parametrize("point", ["apply_done:2", "mid_step:2", "plan_mid:2", "ck_done"])
def test_a_killed_rank_changes_no_weight(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    straight: History,
    parallel: str,
    point: str,
) -> None:
    """Every rank has the failpoint; the first to reach it dies, and torchrun ends the others."""
    broken = create(ledger, tmp_path / "b", trainer={"parallel": parallel})
    with Fleet(around, tmp_path / "engine"):
        with started(broken, around, FAILPOINT=point) as process:
            output, _ = process.communicate(timeout=120)
            assert process.returncode != 0, output[-4000:]
        train(broken, around)
    assert history(ledger, broken) == straight
    assert ledger.call(runs.read, broken).epoch == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_killed_while_it_stores_its_slices_leaves_nothing_that_can_be_loaded(
    around: Services, ledger: Ledger, tmp_path: Path, victim: str
) -> None:
    name = create(
        ledger, tmp_path / "b", steps=3, trainer={"parallel": "fsdp"}, checkpoint={"every": 1}
    )
    point = {"0": "ck_part:4", "1": "ck_part:1"}[victim]  # rank 0 has stored three at creation
    with Fleet(around, tmp_path / "engine"):
        with started(name, around, FAILPOINT=point, FAILPOINT_RANK=victim) as process:
            output, _ = process.communicate(timeout=300)
            assert process.returncode != 0, output[-4000:]
        broken = ledger.call(runs.read, name)
        assert (broken.durable_step, broken.next_step) == (0, 1)
        left = [entry.key for entry in ObjectStore(around).list(f"checkpoints/{name}/00000001/")]
        assert any(key.endswith(f"-{victim}-of-2.safetensors") for key in left)
        assert not any(key.endswith(manifests.NAME) for key in left)
        train(name, around)
    found = ledger.call(runs.read, name)
    assert (found.state, found.version, found.durable_step) == ("finished", 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_a_durable_step(
    around: Services, ledger: Ledger, tmp_path: Path, before: int, after: int
) -> None:
    trainer = {"ranks": before, "parallel": "fsdp" if before > 1 else "ddp"}
    parent = create(ledger, tmp_path / "a", trainer=trainer, checkpoint={"every": 1})
    with Fleet(around, tmp_path / "engine"):
        with started(parent, around, ranks=before, FAILPOINT="ck_done:2") as process:
            output, _ = process.communicate(timeout=120)
            assert process.returncode != 0, output[-4000:]
        stopped = ledger.call(runs.read, parent)
        assert stopped.durable_step == stopped.next_step == 2
        epoch = ledger.call(runs.take_over, parent, "elsewhere:1", lease_s=30, force=True)
        child = ledger.call(lambda tx: fork.fork(tx, parent, epoch, None, shares=after))
        train(child, around, ranks=after)
    found = ledger.call(runs.read, child)
    assert (found.state, found.first_step, found.next_step) == ("finished", 2, 4)
    assert (found.version, found.shares, found.config.trainer.parallel) == (4, after, "ddp")
    with ledger.transaction() as tx:
        first = tx.execute(
            "SELECT c.manifest_sha256 = p.manifest_sha256 AS same FROM checkpoints c "
            "JOIN checkpoints p ON (p.run_id, p.step) = (%s, c.step) "
            "WHERE (c.run_id, c.step) = (%s, 2)",
            (parent, child),
        ).fetchone()
        trained = tx.execute(
            "SELECT g.task_id FROM queue q JOIN groups g USING (run_id, group_id) "
            "WHERE q.run_id = %s AND q.step < 2 OR q.run_id = %s",
            (parent, child),
        ).fetchall()
    assert first == {"same": True}  # it stands at its parent's weights and moments
    assert len({row["task_id"] for row in trained}) == len(trained) == 2 * 2 * (before + after)


@pytest.mark.slow
def test_a_rank_killed_at_any_moment_ends_its_world_in_time(
    around: Services, ledger: Ledger, tmp_path: Path, straight: History, parallel: str
) -> None:
    broken = create(ledger, tmp_path / "b", trainer={"parallel": parallel})
    with Fleet(around, tmp_path / "engine"):
        with started(broken, around) as process:
            while ledger.call(runs.read, broken).next_step < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            ranks = psutil.Process(process.pid).children(recursive=True)
            second = next(p for p in ranks if p.environ().get("RANK") == "1")
            second.send_signal(signal.SIGKILL)
            output, _ = process.communicate(timeout=30)
            assert process.returncode != 0, output[-4000:]
            _, alive = psutil.wait_procs(ranks, timeout=10)
            assert not alive
        train(broken, around)
    assert history(ledger, broken) == straight
