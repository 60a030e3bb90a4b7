"""The trainer process against a real ledger and object store, with the rest of the world played."""

import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from domain.config import RunConfig, Services
from storage import runs
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration
from trainer import loop
from trainer.model import weights_digest

TRAIN_ONCE = Path(__file__).parents[1] / "train_once.py"


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
    settings = {"holder": "elsewhere:1", "patience_s": 20, "stop": fleet.broken} | options
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


def history(ledger: Ledger, name: str) -> list[tuple[Any, ...]]:
    """What must be equal in every execution: digest, update and cause of each step."""
    with ledger.transaction() as tx:
        rows = tx.execute(
            "SELECT step, version_before, updated, groups, cause, weights_sha256, "
            "metrics->>'loss' AS loss, metrics->>'lr' AS lr FROM steps WHERE run_id = %s "
            "ORDER BY step",
            (name,),
        ).fetchall()
    return [tuple(row.values()) for row in rows]


@pytest.fixture
def straight(around: Services, ledger: Ledger, tmp_path: Path, name: str) -> list[tuple[Any, ...]]:
    """The history of an uninterrupted run of the same configuration."""
    run = create(ledger, configuration(f"{name}-s", tmp_path))
    with Fleet(around, tmp_path / "s") as fleet:
        assert train(run, around, fleet) == "finished"
    return history(ledger, run)


def test_a_run_trains_to_its_end(
    around: Services, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    run = create(ledger, configuration(name, tmp_path, steps=5))
    seen: dict[int, str] = {}

    def load(folder: Path, manifest: Any) -> None:
        weights = load_file(folder / "model.safetensors")
        assert weights_digest(weights).hex() == manifest.sha256
        assert len(manifest.meta["probe"]["logprobs"]) == 4
        seen[len(seen)] = manifest.sha256

    with Fleet(around, tmp_path / "engine", on_load=load) as fleet:
        assert train(run, around, fleet) == "finished"
    found = ledger.call(runs.read, run)
    assert (found.state, found.version, found.next_step, found.durable_step) == (
        "finished",
        5,
        5,
        5,
    )
    assert fleet.loaded == [0, 1, 2, 3, 4, 5]
    assert len(set(seen.values())) == 6
    with ledger.transaction() as tx:
        metrics = tx.execute(
            "SELECT metrics FROM steps WHERE run_id = %s AND step = 3", (run,)
        ).fetchone()
        record = tx.execute(
            "SELECT record FROM step_shares WHERE run_id = %s AND step = 3", (run,)
        ).fetchone()
    assert metrics is not None
    assert record is not None
    assert {"loss", "grad_norm", "lr", "entropy", "mismatch/k3", "lag/max", "pack/fill"} <= set(
        metrics["metrics"]
    )
    assert record["record"]["updates"] == 4
    assert record["record"]["groups"] == 2
    assert record["record"]["resubmitted"]["stale"] == 0


@pytest.mark.parametrize("point", ["c_uploaded", "optimizer:3", "apply_done:3", "ck_uploaded:2"])
def test_a_run_that_died_goes_on_with_identical_weights(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    straight: list[tuple[Any, ...]],
    point: str,
) -> None:
    run = create(ledger, configuration(name, tmp_path))
    with Fleet(around, tmp_path / "engine") as fleet:
        crash(run, around, point)
        assert train(run, around, fleet) == "finished"
    assert history(ledger, run) == straight
