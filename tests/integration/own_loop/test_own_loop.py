"""A loop of one's own trains every batch, dies, and goes on."""

from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest

from domain.errors import (
    ConfigError,
    DataChanged,
    LedgerError,
    ReplayDiverged,
)
from domain.services import Services
from rollbook import SchedulerRecord
from storage import runs
from storage.database import Ledger
from tests.own_loop import Scored, Trained, update
from tests.own_loop_runs import BATCHES, Loop, abandon, one_step, same, train
from tests.playing import Fleet, constant


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
