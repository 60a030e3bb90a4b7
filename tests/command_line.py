"""The `rollbook` command in subprocesses, on small runs of the reverse3 example."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rollbook.connect import open_ledger
from rollbook.root import ROOT

CONFIG = """
name = "small"
seed = 0
steps = {steps}

[tasks]
source = "reverse3:source"
dataset = "reverse3:train"
batch_size = 4

[groups]
size = 4

[schedule]
ahead = 1
max_lag = 1

[budget]
max_turns = 1
max_generated_tokens = 4
max_context_tokens = 16

[model.tiny]
dim = 16
layers = 1
heads = 2
max_positions = 16

[trainer]
width = 64
rows = 4
estimator = "mean"
truncation = "score"
lr = 1e-3
threads = 1

[engine]
threads = 1

[checkpoint]
every = {every}
"""


@dataclass
class Rollbook:
    """The command line, run beside one configuration file and one state folder."""

    folder: Path
    state: Path
    environ: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def configure(self, *, steps: int = 5, every: int = 2, more: str = "") -> Path:
        """Write the configuration; `more` is appended."""
        path = self.folder / "small.toml"
        path.write_text(CONFIG.format(steps=steps, every=every) + more)
        (self.folder / "reverse3.py").write_text((ROOT / "examples" / "reverse3.py").read_text())
        return path

    def start(self, *arguments: str, state: bool = True) -> subprocess.Popen[str]:
        """The command, running; it is killed at the end of the test."""
        process = subprocess.Popen(
            [sys.executable, "-m", "rollbook", *arguments]
            + (["--state", str(self.state)] if state else []),
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, code: int = 0, state: bool = True) -> str:
        """What the command prints on standard output; on standard error when it is refused."""
        process = self.start(*arguments, state=state)
        out, err = process.communicate(timeout=300)
        assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
        return err if code else out

    def json(self, *arguments: str) -> Any:
        """The one document that the command prints."""
        return json.loads(self(*arguments, "--json"))

    def rows(self, *queries: str) -> list[list[dict[str, Any]]]:
        """What the ledger answers, with its Postgres alone where the stack is down."""
        with open_ledger(self.state) as ledger, ledger.transaction() as tx:
            return [tx.execute(query.encode()).fetchall() for query in queries]

    def log(self, process: str, run: str = "small") -> str:
        """What a process of a run has logged."""
        return (self.state / "runs" / run / "logs" / f"{process}.log").read_text()


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a command with `--json` tells, as it does."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def until_step(process: subprocess.Popen[str], step: int) -> None:
    """Wait until a run has told that step."""
    for event in events(process):
        if event["event"] == "step" and event["step"] >= step:
            return
    assert process.stderr is not None
    raise AssertionError(f"the run ended before step {step}: {process.stderr.read()}")


def kill_everything(process: subprocess.Popen[str]) -> None:
    """kill -9: the command, the services, the workers, the trainer, all at once."""
    root = psutil.Process(process.pid)
    family = [root, *root.children(recursive=True)]
    for each in family:
        each.suspend()
    for each in family:
        each.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=10)
