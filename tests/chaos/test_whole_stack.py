"""kill -9 of the whole stack, servers included, then `rollbook resume`: nothing is paid for twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from domain.config import RunConfig
from rollbook.root import ROOT
from rollbook.stack.stack import Stack
from rollbook.stack.state import StateFolder
from storage.database import Ledger, Tx
from tests.chaos.stage import Stage, configuration, pause


def rollbook(state: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """The command in a session of its own, with none of the caller's services."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLBOOK_", "AWS_"))}
    with (state / "command.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rollbook", *arguments, "--state", str(state)],
            env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill_everything(command: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to the command and to everything it started, all frozen first."""
    if command.poll() is not None:
        return
    family = [psutil.Process(command.pid)]
    family += family[0].children(recursive=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in family:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
    command.wait()
    psutil.wait_procs(family, timeout=20)


def write_toml(folder: Path, name: str) -> Path:
    """The stage's configuration as a file."""
    table = configuration(name, folder, steps=9, checkpoint={"every": 3, "keep": 100}).model_dump(
        exclude_none=True, exclude_defaults=True, exclude={"root"}
    )
    lines = [f"{key} = {json.dumps(v)}" for key, v in table.items() if not isinstance(v, dict)]
    for section, values in table.items():
        if isinstance(values, dict):
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    path = folder / "run.toml"
    path.write_text("\n".join(lines))
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def until(holds: Any, what: str, state: Path, timeout_s: float = 150) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := holds()):
        log = (state / "command.log").read_text()[-3000:]
        assert time.monotonic() < end, f"not yet: {what}\n{log}"
        time.sleep(0.1)
    return found


@dataclass
class Snapshot:
    """What the ledger holds of a run at one moment."""

    run: dict[str, Any]
    attempts: dict[tuple[int, ...], dict[str, Any]]
    segments: dict[tuple[int, ...], bytes]

    @classmethod
    def of(cls, ledger: Ledger) -> "Snapshot":
        def read(tx: Tx) -> "Snapshot":
            return cls(
                tx.execute("SELECT next_step, durable_step, version FROM runs").fetchall()[0],
                {
                    (a["group_id"], a["sample"], a["attempt"]): a
                    for a in tx.execute("SELECT * FROM attempts")
                },
                {
                    (s["group_id"], s["sample"], s["attempt"], s["seq"]): s["sampled_ids"]
                    for s in tx.execute("SELECT * FROM segments")
                },
            )

        return ledger.call(read)


@pytest.mark.timeout(400)
def test_a_whole_stack_killed_in_full_work_loses_at_most_what_was_on_the_wire(
    tmp_path: Path,
) -> None:
    state = Path(tempfile.mkdtemp(prefix="rollbook-whole-"))
    state.chmod(0o711)  # Postgres steps down to nobody, who must pass
    root = tmp_path / "root"
    path = write_toml(root, "whole")
    config = RunConfig.load(path)
    pause(root, 0.4)
    first = rollbook(state, "run", str(path))
    try:
        until(lambda: in_full_work(state), "the run is in full work", state)
    finally:
        kill_everything(first)
    with Stack.up(state, environ={}) as stack:
        with Stage(stack.services, config, tmp_path / "stage") as stage:
            before = Snapshot.of(stage.ledger)
            pause(root, 0.02)
            second = rollbook(state, "resume", "whole")
            try:
                stage.finish()
                assert second.wait(60) == 0, (state / "command.log").read_text()[-3000:]
            finally:
                kill_everything(second)
            stage.check()
            after = Snapshot.of(stage.ledger)
        compare(before, after)
        replays = stage_replays(stack)
        assert replays == before.run["next_step"] - before.run["durable_step"] > 0
    shutil.rmtree(state, ignore_errors=True)


def compare(before: Snapshot, after: Snapshot) -> None:
    """Nothing that was committed is sampled again."""
    for key, sampled in before.segments.items():
        assert after.segments[key] == sampled
    for key, attempt in before.attempts.items():
        now = after.attempts[key]
        assert now["state"] == "finished", now  # none is lost: this environment resumes
        if attempt["state"] == "finished":
            assert (now["member"], now["fence"]) == (attempt["member"], attempt["fence"])
        elif attempt["state"] == "running":
            assert now["member"]
            assert now["fence"] > attempt["fence"]
    resumed = [a for a in before.attempts.values() if a["state"] == "running"]
    assert any(a["policy_tokens"] > 0 for a in resumed)
    assert all(key[2] == 0 for key in after.attempts), "some sample was tried twice"


def in_full_work(state: Path) -> bool:
    """A step is applied and not durable, members have finished, others are half way."""
    found = StateFolder(state).published() if (state / "lock").exists() else None
    if found is None:
        return False
    try:
        with psycopg.connect(found.services.database_url) as connection:
            row = connection.execute(
                """
                SELECT (SELECT next_step > durable_step AND durable_step > 0 FROM ledger.runs)
                    AND EXISTS (SELECT 1 FROM ledger.attempts
                        WHERE state = 'running' AND policy_tokens > 1)
                    AND EXISTS (SELECT 1 FROM ledger.attempts a
                        JOIN ledger.groups g USING (run_id, group_id)
                        WHERE a.member AND g.state = 'submitted')
                """
            ).fetchone()
    except psycopg.errors.UndefinedTable:
        return False  # the schema is being made
    return bool(row and row[0])


def stage_replays(stack: Stack) -> int:
    with psycopg.connect(stack.services.database_url) as connection:
        row = connection.execute("SELECT sum(replays) FROM ledger.steps").fetchone()
    assert row is not None
    return int(row[0])
