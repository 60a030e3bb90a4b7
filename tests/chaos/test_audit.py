"""`rollbook audit`: a past step is recomputed exactly, or the input that differs is named."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from domain.errors import DigestMismatch, LedgerError
from domain.services import Services
from rollbook.cli import app
from storage import checkpoints, runs
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration
from tests.trained import damage
from trainer import audit, loop


@dataclass
class Trained:
    """A finished run of four steps with the checkpoints 0, 2 and 4."""

    services: Services
    ledger: Ledger
    run: str

    def do(self, query: str, *args: object) -> None:
        def act(tx: Tx) -> None:
            assert tx.execute("SET LOCAL session_replication_role = replica") is not None
            assert tx.execute(query, args).rowcount > 0

        self.ledger.call(act)


@pytest.fixture
def trained(ledger_url: str, ledger: Ledger, s3_services: Services, tmp_path: Path) -> Trained:
    services = s3_services.model_copy(update={"database_url": ledger_url})
    ObjectStore(services).prepare()
    run = f"audited-{tmp_path.name[-20:].lower().strip('_-')}"
    config = configuration(run, tmp_path, checkpoint={"every": 2, "keep": 9})
    ledger.call(runs.create, config, world={})
    with Fleet(services, tmp_path / "engine") as fleet:
        assert loop.run(run, services, holder="a:1", stop=fleet.broken) == "finished"
    return Trained(services, ledger, run)


def test_past_steps_are_recomputed_exactly_and_what_changed_is_named(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, services = trained.run, trained.services
    before = trained.ledger.call(runs.read, run)
    verdict = audit.step(run, services, 3)
    assert (verdict.exact, verdict.checkpoint, verdict.differences) == (True, 2, ())
    assert [v.exact for v in audit.replay(run, services, first=0)] == [True] * 4
    assert trained.ledger.call(runs.read, run) == before  # it only reads
    with pytest.raises(
        LedgerError, match=r"step 4 of run .* was not applied; its steps are 0 to 3"
    ):
        audit.step(run, services, 4)

    for name, value in services.environment().items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(app, ["audit", run, "3", "--json"])
    assert json.loads(told.stdout)[0]["exact"]
    assert told.exit_code == 0

    trained.do(
        "UPDATE segments SET logprobs = set_byte(logprobs, 0, get_byte(logprobs, 0) # 64) "
        "WHERE run_id = %s AND (group_id, sample, seq) = (4, 1, 0)",
        run,
    )
    verdict = audit.step(run, services, 2)
    assert not verdict.exact
    assert verdict.differences == ("rollouts: log-probabilities of group 4.0 have changed since",)
    told = CliRunner().invoke(app, ["audit", run])
    assert "step 2" in told.stdout
    assert "DIFFERS" in told.stdout
    assert "group 4.0" in told.stdout.replace("\n", " ")
    assert told.exit_code == 1

    trained.do("UPDATE checkpoints SET state = 'deleted' WHERE run_id = %s AND step < 2", run)
    told = CliRunner().invoke(app, ["audit", run, "1"])
    assert isinstance(told.exception, LedgerError)
    assert "oldest checkpoint that is kept is 2" in str(told.exception)


FLIP = "UPDATE segments SET {0} = set_byte({0}, 0, get_byte({0}, 0) # {1}) " + (
    "WHERE run_id = %s AND (group_id, sample, seq) = (4, 1, 0)"
)
REWARD = "UPDATE attempts SET reward = 1 - reward WHERE run_id = %s AND (group_id, sample) = (4, 1)"

CHANGED = {  # each with what undoes it
    "rollouts: tokens of group 4.0 have": (FLIP.format("sampled_ids", 1),) * 2,
    "rollouts: log-probabilities of group 4.0 have": (FLIP.format("logprobs", 64),) * 2,
    "rollouts: rewards and statuses of group 4.0 have": (REWARD,) * 2,
    "plan: other groups are bound": (
        "UPDATE queue SET pos = pos + 9 WHERE run_id = %s AND step = 2 AND group_id = 4",
        "UPDATE queue SET pos = pos - 9 WHERE run_id = %s AND step = 2 AND group_id = 4",
    ),
    "configuration: it is not the one": (
        "UPDATE runs SET config = jsonb_set(config, '{run,trainer,lr}', '0.5') WHERE run_id = %s",
        "UPDATE runs SET config = jsonb_set(config, '{run,trainer,lr}', '0.01') WHERE run_id = %s",
    ),
    "weights before the step": (
        "UPDATE steps SET weights_sha256 = set_byte(weights_sha256, 0, "
        "get_byte(weights_sha256, 0) # 128) WHERE run_id = %s AND step IN (1, 2)",
        "UPDATE steps SET weights_sha256 = set_byte(weights_sha256, 0, "
        "get_byte(weights_sha256, 0) # 128) WHERE run_id = %s AND step = 1",
    ),
    "world: torch_version '1.0' ->": (
        "UPDATE runs SET config = jsonb_set(config, '{world,torch_version}', '\"1.0\"') "
        "WHERE run_id = %s",
        "UPDATE runs SET config = jsonb_set(config, '{world,torch_version}', to_jsonb((SELECT "
        "world->>'torch_version' FROM checkpoints WHERE run_id = runs.run_id LIMIT 1))) "
        "WHERE run_id = %s",
    ),
}


def test_each_input_is_told_from_the_others(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    for named, (change, undo) in CHANGED.items():
        trained.do(change, trained.run)
        verdict = audit.step(trained.run, trained.services, 2)
        assert not verdict.exact
        (difference,) = verdict.differences
        assert difference.startswith(named)
        trained.do(undo, trained.run)
    # The booked digest of step 2 is wrong still, and nothing else is.
    for name, value in trained.services.environment().items():
        monkeypatch.setenv(name, value)
    told = CliRunner().invoke(app, ["audit", trained.run, "2"], standalone_mode=False)
    assert "every input is the same" in told.stdout
    assert trained.ledger.call(checkpoints.oldest, trained.run).step == 0


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    def prefix(step: int) -> str:
        row = trained.ledger.call(checkpoints.at, trained.run, step)
        assert row is not None
        return row.prefix

    damage(trained.services, trained.ledger, trained.run, 2)
    verdict = audit.step(trained.run, trained.services, 3)
    assert (verdict.exact, verdict.checkpoint) == (True, 0)
    assert f"{prefix(2)}/weights.safetensors" in caplog.text
    damage(trained.services, trained.ledger, trained.run, 0)
    with pytest.raises(DigestMismatch, match=f"{prefix(0)}/weights.safetensors"):
        audit.step(trained.run, trained.services, 3)
