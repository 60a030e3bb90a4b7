"""What a loop of one's own publishes, and what its replays may make."""

from pathlib import Path

import pytest

from domain.errors import (
    ConfigError,
    EngineRefused,
    LedgerError,
    ReplayDiverged,
)
from domain.services import Services
from rollbook import SchedulerRecord
from storage import runs, versions
from storage.database import Ledger
from tests.own_loop import Scored, Trained, update
from tests.own_loop_runs import BATCHES, Loop, Pushing, abandon, played_health, train
from tests.playing import Fleet


def test_weights_are_published_every_sync_every_versions(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    records: list[SchedulerRecord] = []
    with Fleet(around, tmp_path / "engine") as fleet:
        train(make(sync_every=2, log=records.append), Trained(folder), steps=5)
        assert fleet.loaded == [0, 2, 4]
    assert [r.metrics["publish_lag"] for r in records] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("pushed", [False, True])
def test_a_loop_that_starts_again_pushes_only_what_is_due_after_its_replay(
    make: Loop,
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    folder: Path,
    name: str,
    pushed: bool,
) -> None:
    """Version 3 with a state of version 1: served is 2, or, where it died a little later, 3."""
    with Fleet(around, tmp_path / "engine") as fleet:
        first, state = make(), Trained(folder)
        train(first, state, steps=1)
        saved = (state.save(), first.state_dict())
        train(first, state, steps=2)
        if pushed:
            first(state, BATCHES[3])
        abandon(first)
        again, restored = make(force=True), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        assert len(train(again, restored)) == 5
        assert fleet.loaded == [0, 1, 2, 3, 4, 5]
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT DISTINCT batch, submitted_version AS version FROM groups WHERE run_id = %s "
            "ORDER BY batch",
            (name,),
        ).fetchall()
    # Batch 4 goes out under version 3, whichever of the two pushed it.
    assert [row["version"] for row in rows] == [0, 0, 1, 2, 3, 4]


def test_a_publisher_of_ones_own_is_pushed_to_and_what_it_reports_is_served(
    make: Loop,
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Pushing(start=7)  # its engines hold something newer than this run's weights
    with Fleet(around, tmp_path / "engine"), played_health(monkeypatch):
        one, state = make(weights=own, model=folder), Trained(folder)
        train(one, state, steps=2)
        assert own.pushed == [0, 1]
        own.version = 9  # somebody else pushed
        packed = one(state, BATCHES[2])
        assert own.pushed == [0, 1, 2]
        assert (own.version, ledger.call(versions.served, name)) == (2, 2)
        one.applied(updated=update(state, Scored(), packed))
        own.takes = False
        with pytest.raises(
            EngineRefused, match="version 3 did not take: the engines still report 2"
        ):
            one(state, BATCHES[3])
    found = ledger.call(runs.read, name)
    assert found.state == "failed"
    assert found.failure is not None
    assert "did not take" in found.failure


def test_a_publisher_of_ones_own_that_lost_its_weights_is_pushed_to_on_restart(
    make: Loop,
    around: Services,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Fleet(around, tmp_path / "engine"), played_health(monkeypatch):
        first, state = make(weights=Pushing(), model=folder, sync_every=2), Trained(folder)
        train(first, state, steps=1)
        saved = (state.save(), first.state_dict())
        abandon(first)
        own = Pushing()
        again, restored = make(weights=own, model=folder, sync_every=2, force=True), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        train(again, restored, steps=1)
        assert own.pushed == [1]


def test_a_publisher_of_ones_own_gets_nothing_that_a_replay_only_restores(
    make: Loop,
    around: Services,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Fleet(around, tmp_path / "engine"), played_health(monkeypatch):
        first, state = make(weights=Pushing(), model=folder), Trained(folder)
        train(first, state, steps=1)
        saved = (state.save(), first.state_dict())
        train(first, state, steps=2)
        abandon(first)
        own = Pushing()  # its engines lost everything meanwhile
        again, restored = make(weights=own, model=folder, force=True), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        train(again, restored, steps=3)
        assert own.pushed == [3]


def test_inexact_kernels_may_replay_to_other_bits_if_every_step_is_kept(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first, state = make(exact="order"), Trained(folder)
        train(first, state, steps=1)
        with pytest.raises(LedgerError, match=r"take state_dict\(\)"):
            train(first, state, steps=1)
        first.state_dict()  # taken before step 1, but the process dies before it is saved
        abandon(first)
        again, other = make(exact="order", force=True), Trained(folder)
        other.optimizer.param_groups[0]["lr"] = 0.06
        train(again, other, steps=1)
        again.state_dict()
        assert len(train(again, other, steps=1)) == 1


def test_a_digest_of_ones_own_is_compared(
    make: Loop,
    around: Services,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Fleet(around, tmp_path / "engine"), played_health(monkeypatch):
        first, state = make(weights=Pushing(), model=folder), Trained(folder)
        packed = first(state, BATCHES[0])
        updated = update(state, Scored(), packed)
        with pytest.raises(ConfigError, match="it must be a sha256 of 32"):
            first.applied(updated=updated, digest=b"short")
        first.applied(updated=updated, digest=b"a" * 32)
        abandon(first)
        again, restored = make(weights=Pushing(), model=folder, force=True), Trained(folder)
        packed = again(restored, BATCHES[0])
        with pytest.raises(ReplayDiverged):
            again.applied(updated=update(restored, Scored(), packed), digest=b"b" * 32)
        again.applied(digest=b"a" * 32)
