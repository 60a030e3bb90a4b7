"""A loop of one's own on a real ledger and object store, with workers and engines played."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from domain.errors import (
    ConfigError,
    DataChanged,
    EngineRefused,
    LedgerError,
    ReplayDiverged,
)
from domain.rollouts import Task
from domain.services import Services
from rollbook import EnginePublisher, PromptSource, RolloutScheduler, SchedulerRecord, scheduler
from storage import runs, versions
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.own_loop import Scored, Trained, model_folder, update
from tests.playing import ENGINE, Fleet, constant

BATCHES = [[2 * i, 2 * i + 1] for i in range(6)]
Loop = Callable[..., RolloutScheduler]


def reward(text: str, task: Task) -> float:
    raise AssertionError("rollouts are played")


def to_tasks(batch: list[int]) -> list[Task]:
    return [Task(f"t{n}", {"prompt": f"{7 * n % 1000:03d}="}) for n in batch]


class Alone:
    """Services without any process beside the loop."""

    def __init__(self, services: Services | None, state: Path) -> None:
        assert services is not None
        self.services = services
        self.closed = False

    def start(self, config: object, located: object) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def around(ledger_url: str, ledger: Ledger, s3_services: Services) -> Services:
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(update={"database_url": ledger_url, "engines": (ENGINE,)})


@pytest.fixture
def name() -> str:
    return f"own{secrets.token_hex(4)}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def make(
    around: Services, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Loop]:
    """Schedulers of one run; all are closed in the end."""
    monkeypatch.setattr(scheduler, "Companions", Alone)
    made: list[RolloutScheduler] = []

    def make(**settings: Any) -> RolloutScheduler:
        defaults: dict[str, Any] = {
            "width": 32,
            "rows": 2,
            "tasks": to_tasks,
            "estimator": "mean",
            "run": name,
            "services": around,
            "budget": {"max_generated_tokens": 4, "max_context_tokens": 16},
            "weights": EnginePublisher(folder),
            "max_lag": 2,
        }
        one = RolloutScheduler(Scored(), PromptSource(reward), **(defaults | settings))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


Seen = list[dict[str, Any]]


def train(
    one: RolloutScheduler, state: Trained, batches: Any = BATCHES, *, steps: int = 99
) -> Seen:
    """Train up to so many steps; the rows of each."""
    seen: Seen = []
    for batch in one.tasks(batches):
        packed = one(state, batch)
        seen.append(packed)
        one.applied(updated=update(state, Scored(), packed))
        if len(seen) == steps:
            break
    return seen


def same(one: Seen, other: Seen) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)
        for a, b in zip(one, other, strict=True)
    )


def test_a_loop_trains_every_batch_and_finishes(
    make: Loop, around: Services, ledger: Ledger, tmp_path: Path, folder: Path, name: str
) -> None:
    records: list[SchedulerRecord] = []
    with Fleet(around, tmp_path / "engine") as fleet:
        one = make(log=records.append)
        state = Trained(folder)
        seen = train(one, state)
        assert one.state_dict() == {"format": 1, "run": name, "step": 6, "version": 6}
        one.close()
    assert len(seen) == 6
    assert seen[0]["input_ids"].shape == seen[0]["old_logprobs"].shape == (2, 32)
    found = ledger.call(runs.read, name)
    assert (found.state, found.version, found.next_step, found.durable_step) == (
        "finished",
        6,
        6,
        6,
    )
    assert fleet.loaded[:6] == [0, 1, 2, 3, 4, 5]
    assert [r.updates for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.groups for r in records] == [2] * 6
    assert records[0].lag == 0
    assert max(r.lag for r in records) == 1
    assert set(records[0].resubmitted) == {
        "infra_error",
        "cancelled",
        "stale",
        "timeout",
        "unscored",
    }
    assert {"reward/mean", "mismatch/k3", "pack/fill", "lag/max", "publish_lag"} <= set(
        records[3].metrics
    )
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT h.record, s.metrics FROM step_shares h JOIN steps s USING (run_id, step) "
            "WHERE run_id = %s ORDER BY step",
            (name,),
        ).fetchall()
    for record, row in zip(records, rows, strict=True):
        assert row["record"]["updates"] == record.updates
        assert row["record"]["waited"] == pytest.approx(record.waited)
        assert row["record"]["resubmitted"] == record.resubmitted
        assert row["metrics"]["reward/mean"] == pytest.approx(record.metrics["reward/mean"])


def test_a_loop_that_died_gets_the_same_rows_again_and_ends_alike(
    make: Loop, around: Services, ledger: Ledger, tmp_path: Path, folder: Path, name: str
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first, state = make(), Trained(folder)
        begun = train(first, state, steps=2)
        checkpoint = (state.save(), first.state_dict())
        lost = train(first, state, steps=2)  # two steps that no checkpoint of the loop has
        abandon(first)

        again, restored = make(force=True), Trained(folder)
        restored.load(checkpoint[0])
        again.load_state_dict(checkpoint[1])
        replayed = train(again, restored)
        assert again.state_dict()["step"] == 6
    assert same(replayed[:2], lost)
    assert len(begun) == 2
    assert len(replayed) == 4
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT step, replays, weights_sha256 FROM steps WHERE run_id = %s ORDER BY step",
            (name,),
        ).fetchall()
    assert [row["replays"] for row in rows] == [0, 0, 1, 1, 0, 0]
    assert [row["step"] for row in rows] == list(range(6))


def test_without_a_checkpoint_the_whole_run_is_handed_out_again(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first = make()
        begun = train(first, Trained(folder), steps=3)
        first.state_dict()  # taken, and lost
        abandon(first)
        again = make(force=True)
        assert same(train(again, Trained(folder), steps=3), begun)


def test_a_planned_step_that_was_not_applied_is_handed_out_again(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first, state = make(), Trained(folder)
        train(first, state, steps=1)
        packed = first(state, BATCHES[1])
        saved = (state.save(), first.state_dict())
        abandon(first)
        again, restored = make(force=True), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        assert same(train(again, restored, steps=1), [packed])


def test_other_weights_in_a_replay_stop_the_loop(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first = make()
        train(first, Trained(folder), steps=1)
        abandon(first)
        again, other = make(force=True), Trained(folder)
        other.optimizer.param_groups[0]["lr"] = 0.3
        with pytest.raises(ReplayDiverged, match="step 0"):
            train(again, other, steps=1)


def test_a_state_of_another_step_is_refused(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first, state = make(), Trained(folder)
        train(first, state, steps=2)
        saved = first.state_dict()
        abandon(first)
        again = make(force=True)
        again.load_state_dict(saved)
        with pytest.raises(LedgerError, match=r"updates is 0, but step 2 .* from version 2"):
            train(again, Trained(folder))
        with pytest.raises(ConfigError, match="is of run 'other'"):
            again.load_state_dict(saved | {"run": "other"})
        with pytest.raises(LedgerError, match="only 2 steps"):
            again.load_state_dict(saved | {"step": 3})


def test_steps_are_taken_one_by_one(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        one, state = make(), Trained(folder)
        with pytest.raises(LedgerError, match="no step was handed out"):
            one.applied()
        packed = one(state, BATCHES[0])
        with pytest.raises(LedgerError, match="was handed out and not applied"):
            one(state, BATCHES[1])
        with pytest.raises(LedgerError, match="count the update in the state first"):
            one.applied()
        one.applied(updated=update(state, Scored(), packed), metrics={"mine": 1.0})
        one.close()
        with pytest.raises(LedgerError, match="is closed"):
            one(state, BATCHES[1])


def test_the_data_must_be_what_it_was(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        one, state = make(), Trained(folder)
        for batch in one.tasks(BATCHES):
            with pytest.raises(DataChanged, match="when it was read ahead"):
                one(state, [*batch, 99])
            break
        train(one, state, steps=1)
        saved = (state.save(), one.state_dict())
        abandon(one)
        again, restored = make(force=True), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        with pytest.raises(DataChanged, match="batch 1 of run"):
            train(again, restored, [BATCHES[0], [77, 78], *BATCHES[2:]])
        with pytest.raises(DataChanged, match="ends after 0 batches"):
            list(again.tasks([]))


def test_the_end_of_the_data_is_the_end_of_the_run(
    make: Loop, around: Services, ledger: Ledger, tmp_path: Path, folder: Path, name: str
) -> None:
    with Fleet(around, tmp_path / "engine"):
        one, state = make(), Trained(folder)
        assert len(train(one, state, BATCHES[:2])) == 2
        with pytest.raises(ConfigError, match="all epochs as one iterable"):
            train(one, state, BATCHES[:2])
        saved = (state.save(), one.state_dict())
        one.close()
        assert ledger.call(runs.read, name).state == "finished"
        again, restored = make(), Trained(folder)
        restored.load(saved[0])
        again.load_state_dict(saved[1])
        assert train(again, restored, BATCHES[:2]) == []


def test_close_cancels_what_is_in_flight_and_keeps_it_owed(
    make: Loop,
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollbook.own_run.QUIET_S", 0.2)  # what is held never notices
    with Fleet(around, tmp_path / "engine") as fleet:
        fleet.held = {2, 3}  # of the batch that is sampled ahead: they never finish by themselves
        one, state = make(), Trained(folder)
        train(one, state, steps=1)
        one.close()
        found = ledger.call(runs.read, name)
        assert (found.state, found.next_step) == ("closed", 1)
        with ledger.transaction() as tx:
            states = tx.execute(
                "SELECT state, count(*) AS n FROM groups WHERE run_id = %s AND batch > 0 "
                "GROUP BY 1",
                (name,),
            ).fetchall()
        assert {row["state"] for row in states} == {"registered"}
        fleet.held = set()
        again = make()
        again.load_state_dict(one_step(name))
        assert len(train(again, state)) == 5


def one_step(name: str) -> dict[str, Any]:
    return {"format": 1, "run": name, "step": 1, "version": 1}


def test_an_empty_step_makes_no_update_and_the_next_one_trains(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    records: list[SchedulerRecord] = []
    with Fleet(around, tmp_path / "engine") as fleet:
        fleet.abandoned = {2, 3}
        seen = train(make(log=records.append), Trained(folder), steps=3)
    assert not seen[1]["response_mask"].any()
    assert [r.groups for r in records] == [2, 0, 2]
    assert [r.updates for r in records] == [1, 1, 2]
    assert records[1].version is None
    assert sum(r.abandoned for r in records) == 2


def test_a_batch_without_signal_makes_no_version(
    make: Loop, around: Services, ledger: Ledger, tmp_path: Path, folder: Path, name: str
) -> None:
    with Fleet(around, tmp_path / "engine", answer=constant) as fleet:
        train(make(), Trained(folder), steps=2)
        assert fleet.loaded == [0]
    with ledger.transaction() as tx:
        causes = tx.execute("SELECT cause FROM steps WHERE run_id = %s", (name,)).fetchall()
    assert [row["cause"] for row in causes] == ["no_usable_gradient"] * 2


def test_a_loop_whose_engines_sample_from_other_weights_is_paused(
    make: Loop,
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    folder: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Synchronous, so that every token is the loop's own version's; the played ones are invented.
    records: list[SchedulerRecord] = []
    with Fleet(around, tmp_path / "engine"):
        one, state = make(ahead=0, max_lag=0, log=records.append), Trained(folder)
        train(one, state, steps=2)
        assert ledger.call(runs.read, name).state == "paused"
        assert "trainer and engines disagree" in caplog.text
        assert f"`rollbook unpause {name}` goes on" in caplog.text
        going_on = Timer(1.0, lambda: ledger.call(runs.unpause, name))
        going_on.start()
        train(one, state, steps=1)
        going_on.join()
    assert len(records) == 3
    with ledger.transaction() as tx:
        waited = tx.execute(
            "SELECT metrics ->> 'waited/paused' AS s FROM steps WHERE run_id = %s AND step = 2",
            (name,),
        ).fetchone()
    assert waited is not None
    assert float(waited["s"]) > 0.2  # the third step stood still meanwhile


def test_weights_are_published_every_sync_every_versions(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    records: list[SchedulerRecord] = []
    with Fleet(around, tmp_path / "engine") as fleet:
        train(make(sync_every=2, log=records.append), Trained(folder), steps=5)
        assert fleet.loaded == [0, 2, 4]
    assert [r.metrics["publish_lag"] for r in records] == [1, 2, 1, 2, 1]


class Pushing:
    """A publisher of one's own; its engines are played."""

    def __init__(self, start: int = -1) -> None:
        self.version = start
        self.pushed: list[int] = []
        self.takes = True

    def load(self, weights: Any, version: int) -> None:
        assert "lm_head.weight" in weights
        self.pushed.append(version)
        if self.takes:
            self.version = version


@contextmanager
def played_health(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rollbook.publishing._incarnation", lambda url: 1)
    yield


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


def test_a_run_keeps_its_settings_and_its_model(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with Fleet(around, tmp_path / "engine"):
        first = make()
        train(first, Trained(folder), steps=1)
        first.close()
        with pytest.raises(ConfigError, match=r"trainer\.rows = 2, now 3"):
            make(rows=3)
        with pytest.raises(ConfigError, match=r"tasks\.batch_size = 2, now 5"):
            make(batch_size=5)
        (folder / "tokenizer_config.json").write_text("{}")
        again = make()
        with pytest.raises(ConfigError, match="chat template differ"):
            again(Trained(folder), BATCHES[0])


def test_weights_of_another_model_are_refused_by_name(
    make: Loop, around: Services, tmp_path: Path, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"state\.weights does not belong to the model"):
        make()(SimpleNamespace(updates=0, weights={"w": 1}), BATCHES[0])


def abandon(one: RolloutScheduler) -> None:
    """What kill -9 leaves: the ledger as it is, the lease not given back."""
    assert one._run is not None
    one._run.release()
    one._companions = None


@pytest.mark.parametrize(("on_reopen", "generation"), [("adopt", 0), ("cancel", 1)])
def test_groups_that_still_run_are_adopted_or_cancelled_when_the_loop_starts_again(
    make: Loop,
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    folder: Path,
    name: str,
    on_reopen: str,
    generation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollbook.own_run.QUIET_S", 0.2)  # what is held never notices
    with Fleet(around, tmp_path / "engine") as fleet:
        fleet.held = {2, 3}
        first, state = make(on_reopen=on_reopen), Trained(folder)
        train(first, state, steps=1)
        with ledger.transaction() as tx:
            query = "SELECT gen, state FROM groups WHERE run_id = %s AND batch = 1"
            assert [r["gen"] for r in tx.execute(query, (name,))] == [0, 0]
        abandon(first)
        make(on_reopen=on_reopen, force=True)
        with ledger.transaction() as tx:
            found = tx.execute(query, (name,)).fetchall()
    assert [row["gen"] for row in found] == [generation] * 2
    assert {row["state"] for row in found} == {"registered" if generation else "submitted"}


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


def test_only_its_own_loop_trains_such_a_run(
    make: Loop, around: Services, tmp_path: Path, folder: Path, name: str
) -> None:
    from trainer import loop

    with Fleet(around, tmp_path / "engine"):
        one = make()
        train(one, Trained(folder), steps=1)
        one.close()
        with pytest.raises(ConfigError, match="is trained by a Python loop"):
            loop.run(name, around, holder="elsewhere:1")
