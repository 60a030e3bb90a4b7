"""What the tests of the trainer share: runs, crashes, histories."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from domain.config import RunConfig
from domain.services import Services
from storage import checkpoints, runs
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.playing import Fleet
from trainer import loop

TRAIN_ONCE = Path(__file__).with_name("train_once.py")


History = list[tuple[Any, ...]]


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


def damage(around: Services, ledger: Ledger, run: str, step: int) -> None:
    """Flip one byte of a checkpoint's weights, as a bad disk would."""
    row = ledger.call(checkpoints.at, run, step)
    assert row is not None
    store, key = ObjectStore(around), f"{row.prefix}/weights.safetensors"
    content = bytearray(store.get(key))
    content[-1] ^= 1
    store._s3.put_object(Bucket=store.bucket, Key=key, Body=bytes(content))


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
