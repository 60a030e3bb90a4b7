"""Postgres is frozen as a whole behind a living kernel: connections stay open, nothing answers.

Longer than `ANSWER_S`, so that every process must notice by itself: neither the kernel nor the frozen
server's own time limits tell it.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from rollbook.root import ROOT
from rollbook.stack.child import Restart
from rollbook.stack.stack import Stack
from storage.connections import ANSWER_S
from tests.chaos.stage import PROCESSES, Stage
from tests.chaos.whole import Whole, write_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SILENT = "has not answered for 30 s"
UNREACHED = ("connection timeout expired", "couldn't get a connection")


@contextmanager
def frozen(server: psutil.Process) -> Iterator[None]:
    """SIGSTOP to the server and every process of it."""
    server.suspend()  # first, so that it starts no more children
    family = [server, *server.children(recursive=True)]
    try:
        for process in family:
            process.suspend()
        yield
    finally:
        for process in reversed(family):
            process.resume()


def postgres(stack: Stack) -> psutil.Process:
    assert stack.supervisor is not None
    pid = next(r.pid for r in stack.supervisor.reports() if r.name == "postgres")
    assert pid is not None
    return psutil.Process(pid)


def said(stage: Stage, name: str, *texts: str) -> bool:
    log = stage.log(name).read_text()
    return any(text in log for text in texts)


def ask(stage: Stage, *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "rollbook", *command],
        env={"PATH": "/usr/bin:/bin", **stage.services.environment(), "PYTHONPATH": str(ROOT)},
        timeout=ANSWER_S + 30,
        capture_output=True,
        text=True,
        check=False,
    )


def test_everybody_notices_says_so_and_goes_on_when_it_wakes(stage: Stage, stack: Stack) -> None:
    stage.begin(groups={"timeout": None})  # which would run on meanwhile
    stage.pause(0.3)
    stage.start_all()
    stage.until_step(1)
    stage.until_rollouts_run()
    with frozen(postgres(stack)):
        for name in ("trainer", "rollouts", "ledger"):  # workflows ask nothing meanwhile
            stage.until(partial(said, stage, name, SILENT), f"{name} says that Postgres is silent")
        asked = ask(stage, "stuck", stage.run)
        assert asked.returncode == 2
        assert "no connection to the ledger" in asked.stderr
        assert "frozen" in asked.stderr
    stage.pause(0.02)
    stage.finish()
    stage.check()
    assert [report.restarts for report in stage.supervisor.reports()] == [0] * len(PROCESSES)


def test_a_trainer_gives_up_after_the_longest_outage(stage: Stage, stack: Stack) -> None:
    stage.begin(schedule={"max_outage": 20.0})
    stage.start("engine", "workflows", "ledger", "rollouts")
    stage.start("trainer", restart=Restart(after="never"))
    stage.until_step(1)
    with frozen(postgres(stack)):
        # Silence is noticed after 30 s, which the outage has lasted longer than by then.
        assert stage.supervisor.wait("trainer", timeout_s=2 * ANSWER_S + 20) not in (0, None)
    assert said(stage, "trainer", SILENT, *UNREACHED)
    stage.run_trainer()
    stage.finish()
    stage.check()


def test_a_run_that_one_command_started_outlives_it_with_its_evaluator(tmp_path: Path) -> None:
    """Longer than any patience but `schedule.max_outage`: nothing may end, and Ctrl-C would be heard."""
    root = tmp_path / "root"
    evaluation = {"dataset": "tasks.jsonl", "every": 2}
    path = write_toml(
        root, "one", steps=6, groups={"timeout": None, "heartbeat": 60.0}, evaluation=evaluation
    )
    with Whole.folder() as whole:
        command = whole.rollbook("run", str(path))
        whole.until(lambda: whole.ask("SELECT 1 FROM runs WHERE next_step >= 2"), "two steps")
        family = psutil.Process(command.pid).children(recursive=True)
        (server,) = (
            p
            for p in family
            if p.name() == "postgres" and p.parent().name() != "postgres"  # type: ignore[union-attr]
        )
        with frozen(server):
            time.sleep(100)
            assert command.poll() is None
        assert command.wait(timeout=240) == 0, whole.log.read_text()[-3000:]
        told = whole.log.read_text()
    assert told.count("the ledger does not answer, the run waits for it") == 1
    assert "finished" in told
    assert "held out" in told
