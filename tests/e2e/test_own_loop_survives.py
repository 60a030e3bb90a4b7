"""A hand-written loop, killed with -9 in the middle, goes on to the same end: the example itself."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from domain.sources import resolve
from rollbook.stack.stack import Stack
from storage.database import Ledger
from tests.ledger_fixtures import check_invariants

ROOT = Path(__file__).parents[2]
STEPS = 6
LONGEST_S = 240.0


class Loop:
    """The example as a process; its lines."""

    def __init__(self, folder: Path, number: int) -> None:
        self.log = folder / f"loop-{number}.log"
        options = ("--steps", str(STEPS), "--folder", "own", "--state", "state")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "own_loop.py"), *options],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, line: str) -> None:
        """Return once it has said so."""
        give_up = time.monotonic() + LONGEST_S
        while line not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < give_up, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.mark.timeout(600)
def test_a_loop_killed_in_the_middle_goes_on_to_the_same_end(tmp_path: Path) -> None:
    first = Loop(tmp_path, 1)
    try:
        first.wait_for("step 3:")
    finally:
        first.kill()
    second = Loop(tmp_path, 2)
    try:
        assert second.process.wait(LONGEST_S) == 0, second.log.read_text()[-4000:]
    finally:
        second.kill()
    lines = second.log.read_text().splitlines()
    assert lines[-1] == "done"
    (begun,) = [line for line in lines if line.startswith("from the checkpoint")]
    assert int(begun.rpartition(" ")[2]) in (2, 3)
    told = [line.partition(":")[0] for line in lines if line.startswith("step ")]
    assert told == [f"step {n}" for n in range(4, STEPS + 1)]  # booked once, told once

    with Stack.up(tmp_path / "state", environ=os.environ) as stack:
        ledger = Ledger.open(stack.services.database_url)
        try:
            ledger.call(check_invariants)
            run = rows(ledger, "SELECT state, version, next_step FROM runs")
            assert run == [{"state": "finished", "version": STEPS, "next_step": STEPS}]
            trained = rows(
                ledger,
                "SELECT q.step, g.task_id FROM queue q JOIN groups g USING (run_id, group_id) "
                "WHERE q.state = 'trained' ORDER BY q.step, g.pos",
            )
            owed = rows(ledger, "SELECT owed FROM balance")
        finally:
            ledger.close()
    wanted = list(resolve("own_loop:batches", root=ROOT / "examples", key="data")(STEPS))
    assert [(r["step"], r["task_id"]) for r in trained] == [
        (step, task.id) for step, batch in enumerate(wanted) for task in batch
    ]
    assert Counter(r["step"] for r in trained) == dict.fromkeys(range(STEPS), 16)
    assert owed == [{"owed": 0}]


def rows(ledger: Ledger, query: str) -> list[dict[str, Any]]:
    with ledger.transaction() as tx:
        return tx.execute(query).fetchall()
