"""Whole runs: the embedded stack, the real processes, and a vLLM server that samples for them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from domain.config import TinyModel
from rollbook.root import ROOT
from rollbook.stack.stack import Stack
from tests.policy_runs import CACHED
from tests.vllm.lab import QWEN3
from trainer import folders

STEPS = 3
ALPHABET = TinyModel.model_fields["alphabet"].default

FULL_WEIGHTS = """
[sampling]
policy = "segment"
[sampling.kv_cache]
max_staleness = 1
[model.tiny]
dim = 64
heads = 2
"""
"""Replaced in place; heads of 32, the smallest that vLLM computes on a CPU."""

ADAPTERS = """
[model]
path = "model"
initial = "random"
[model.lora]
rank = 4
"""
"""One adapter a version; rollouts keep the version they began with."""

PADDED = """
import reverse3

from rollbook import PromptSource, Task


def train():
    return [Task(t.id, {**t.data, "prompt": "0" * 40 + t.data["prompt"]}) for t in reverse3.train()]


def reward(text, task):
    return sum(letter in "01234" for letter in text) / 6


source = PromptSource(reward)
"""
"""Rewards that differ from the first step on, and prompts longer than the blocks in which vLLM caches; each turn is sampled in two requests."""

TOML = """
name = "{name}"
steps = {steps}
[tasks]
source = "padded:source"
dataset = "padded:train"
batch_size = 4
[groups]
size = 4
[schedule]
ahead = 1
max_lag = 1
[budget]
max_turns = 1
max_generated_tokens = 6
max_context_tokens = 64
segment_tokens = 3
[trainer]
width = 64
rows = 8
estimator = "mean"
truncation = "score"
lr = 1e-2
threads = 1
[engine]
kind = "vllm"
max_batch = 16
threads = 1
"""


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rollbook-vllm-"))
    folder.chmod(0o711)  # Postgres steps down to nobody, who must pass
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run(state: Path, root: Path, name: str, extra: str) -> list[dict[str, Any]]:
    """Run it to its end; every segment, with the metrics of the steps beside them."""
    shutil.copy(ROOT / "examples" / "reverse3.py", root)
    (root / "padded.py").write_text(PADDED)
    path = root / "run.toml"
    path.write_text(TOML.format(name=name, steps=STEPS) + extra)
    done = subprocess.run(
        [sys.executable, "-m", "rollbook", "run", str(path), "--state", str(state), "--json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    logs = "".join(
        f"\n== {log.name}\n{log.read_text()[-1500:]}" for log in state.glob("runs/*/logs/*.log")
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    with (
        Stack.up(state, environ={}) as stack,
        psycopg.connect(stack.services.database_url, row_factory=dict_row) as connection,
    ):
        connection.execute("SET search_path = ledger")
        found = connection.execute("SELECT state, next_step, version FROM runs").fetchone()
        assert found == {"state": "finished", "next_step": STEPS, "version": STEPS}
        first = connection.execute("SELECT metrics FROM steps WHERE step = 0").fetchone()
        assert first is not None
        assert first["metrics"]["drift/mean"] < 1e-4, json.dumps(first["metrics"], indent=1)
        cached = connection.execute(CACHED, {"run": name}).fetchall()
        assert [step["step"] for step in cached] == list(range(STEPS))
        assert all(step["told"] == pytest.approx(step["recorded"]) for step in cached)
        assert all(0 < step["told"] < 1 for step in cached), cached
        return connection.execute(
            "SELECT oldest_version, newest_version, kv_version FROM segments"
        ).fetchall()


def test_full_weights_are_replaced_in_place_under_a_run_by_segments(
    state: Path, tmp_path: Path
) -> None:
    segments = run(state, tmp_path, "full", FULL_WEIGHTS)
    assert len({s["newest_version"] for s in segments}) > 1
    assert all(s["newest_version"] - s["kv_version"] <= 1 for s in segments)


def test_a_run_of_adapters_samples_each_rollout_under_one_version(
    state: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    folders.materialise_tiny(TinyModel(max_positions=64), model)
    QWEN3.__class__(
        **(QWEN3.to_dict() | {"vocab_size": len(ALPHABET) + 1, "eos_token_id": len(ALPHABET)})
    ).save_pretrained(model)
    segments = run(state, tmp_path, "adapters", ADAPTERS)
    assert len({s["newest_version"] for s in segments}) > 1
    assert all(s["oldest_version"] == s["newest_version"] for s in segments)
