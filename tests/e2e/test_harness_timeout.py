"""`groups.timeout` ends a program that never does, with everything it started."""

import json

import psutil
import pytest

from tests.command_line import CONFIG, Rollbook

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MARK = "rollbook-sleeper-5f1c"
SLEEPER = f"""
from rollbook import HarnessSource

def never(rollout, task):
    raise AssertionError("a program that timed out is not judged")

source = HarnessSource(
    ["sh", "-c", "sleep 3600 & sleep 3600"], never, env={{"MARK": "{MARK}"}}
)
"""


def marked() -> list[int]:
    """Processes that carry the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == MARK and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_program_that_never_ends_is_ended_by_its_groups_timeout(rollbook: Rollbook) -> None:
    path = rollbook.configure(steps=2)
    text = CONFIG.format(steps=2, every=2)
    text = text.replace('"reverse3:source"', '"sleeper:source"').replace(
        "[groups]\nsize = 4\n",
        "[groups]\nsize = 2\ntimeout = 3.0\nmax_attempts = 1\nquarantine_after = 1\n",
        1,
    )
    text = text.replace("[schedule]\n", "[schedule]\nmax_empty_batches = 1\n")
    path.write_text(text)
    (rollbook.folder / "sleeper.py").write_text(SLEEPER)
    told = [json.loads(line) for line in rollbook("run", str(path), "--json", code=1).splitlines()]
    assert told == [] or told[-1]["state"] == "failed"
    ended, groups, violations = rollbook.rows(
        "SELECT DISTINCT error_type FROM attempts",
        "SELECT DISTINCT closed_cause FROM groups WHERE state = 'abandoned'",
        "SELECT * FROM ledger_violations",
    )
    assert {"TIMED_OUT", "TimeoutError"} & {row["error_type"] for row in ended}
    assert groups == [{"closed_cause": "max_attempts"}]
    assert violations == []
    assert marked() == []
