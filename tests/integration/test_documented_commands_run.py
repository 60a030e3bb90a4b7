"""The documented commands that look at a run, run on a real one; for the rest, the tests that run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from domain.errors import RunNotFound
from rollbook.cli import app
from rollbook.stack import ports
from tests.documented import ROOT, Typed, commands
from tests.short_run import RUN, ShortRun

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the sinks' own packages
]

LOOKING = {"status", "stuck", "inspect", "sql", "decode", "quarantine", "report", "log", "db"}
"""Run here, each in turn."""
ELSEWHERE = {
    "run": "tests/e2e/test_life_of_a_run.py",
    "resume": "tests/e2e/test_life_of_a_run.py",
    "create": "tests/e2e/test_commands.py",
    "pause": "tests/e2e/test_commands.py",
    "unpause": "tests/e2e/test_commands.py",
    "up": "tests/e2e/test_commands.py",
    "down": "tests/e2e/test_commands.py",
    "audit": "tests/chaos/test_audit.py",
    "evaluate": "tests/e2e/test_commands.py",
    "metrics": "tests/integration/test_documented_commands_run.py",
    "worker": "tests/chaos/stage.py",
    "trainer": "tests/chaos/stage.py",
    "engine": "tests/chaos/stage.py",
    "evaluator": "tests/e2e/test_mixes.py",
    "gateway": "tests/integration/rollouts/test_killed_gateway.py",
    "import-model": "tests/integration/test_import_model.py",
}
"""They start processes or change the run; these tests run them."""
INSTEAD = {"…": "SELECT 1 AS one", "RUN": RUN, "math": RUN, "SAMPLE": "0", "[SAMPLE]": "0"}
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def unplaced(short_run: ShortRun, typed: Typed) -> list[str]:
    """The command's words, with what this run has for the page's examples."""
    with short_run.ledger.transaction() as tx:
        groups = tx.execute(
            "SELECT group_id::text AS g, task_id AS t FROM trained_rollouts"
        ).fetchall()
        held = tx.execute("SELECT task_id AS t FROM quarantine").fetchall()
    own = {"42": groups[0]["g"], "GROUP": groups[0]["g"]}
    own |= {"TASK": (held or groups)[0]["t"], "107": (held or groups)[0]["t"]}
    return [INSTEAD.get(word, own.get(word, word)) for word in typed.words[1:]]


@pytest.mark.parametrize(
    "typed",
    [t for t in commands() if t.words[0].endswith("rollbook") and t.words[1] in LOOKING],
    ids=lambda t: f"{t.page}: {t.line}",
)
def test_what_looks_at_a_run_does(
    short_run: ShortRun, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = unplaced(short_run, typed)
    if len(words) == 1 and words[0] not in ("status", "db"):
        return  # named in prose, without its arguments
    for target in (word for word in words if word.partition(":")[0] in PACKAGES):
        pytest.importorskip(PACKAGES[target.partition(":")[0]], reason="an extra of its own")
    if "--watch" in words:
        words.remove("--watch")  # a run that has ended is shown once
    if "--release" in words and not _quarantined(short_run):
        words = words[: words.index("--release")]
    monkeypatch.chdir(tmp_path)
    for name, value in short_run.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, f"{words}: {answer.output}\n{answer.exception!r}"


@pytest.mark.parametrize("name", ["", "revrse3", f"{RUN}.2"])
def test_a_run_that_is_not_there_is_neither_resumed_nor_begun(
    short_run: ShortRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in short_run.environment().items():
        monkeypatch.setenv(variable, value)
    answer = CliRunner().invoke(app, ["resume", name, "--state", str(tmp_path)])
    assert isinstance(answer.exception, RunNotFound)
    assert RUN in str(answer.exception)
    with short_run.ledger.transaction() as tx:
        assert [row["run_id"] for row in tx.execute("SELECT run_id FROM runs")] == [RUN]


def test_metrics_are_served_until_told_to_stop(short_run: ShortRun) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rollbook", "metrics", "--port", str(ports.free_port()), "--json"],
        env={**short_run.environment(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads("".join(process.stdout.readline() for _ in range(3)))
        assert f'rollbook_step{{run="{RUN}"}} 6.0' in httpx.get(told["url"], timeout=20).text
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def _quarantined(short_run: ShortRun) -> bool:
    with short_run.ledger.transaction() as tx:
        row: Any = tx.execute("SELECT count(*) AS n FROM quarantine").fetchone()
    return bool(row["n"])


def test_every_other_command_is_run_by_a_test() -> None:
    documented = {t.words[1] for t in commands() if t.words[0].endswith("rollbook")}
    assert documented <= LOOKING | ELSEWHERE.keys()
    for command, path in ELSEWHERE.items():
        assert f'"{command}"' in (ROOT / path).read_text() or path.endswith("model.py"), command
