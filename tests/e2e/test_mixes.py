"""A mix of environments through the command line, evaluated while it goes on, its evaluator killed."""

import json

import psutil
import pytest

from tests.command_line import CONFIG, Rollbook, events

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MIX = """
[[tasks.mix]]
environment = "plain"
source = "reverse3:source"
dataset = "reverse3:train"
ratio = 3

[[tasks.mix]]
environment = "odd"
source = "odd:make"
args = { bonus = 0.25 }
dataset = "reverse3:train"
in_flight = 1

[evaluation]
dataset = "reverse3:held_out"
environment = "plain"
every = 10
"""
ODD = """
import reverse3
from rollbook import PromptSource

def make(bonus):
    def reward(text, task):
        assert task.id.startswith("odd/")
        return reverse3.reward(text, task) + bonus
    return PromptSource(reward)
"""
ONE = """
[tasks]
source = "reverse3:source"
dataset = "reverse3:train"
batch_size = 4
"""


def test_a_mix_is_trained_by_its_ratio_and_evaluated_meanwhile(rollbook: Rollbook) -> None:
    path = rollbook.configure(steps=30)
    path.write_text(
        CONFIG.format(steps=30, every=2).replace(ONE, "[tasks]\nbatch_size = 4\n") + MIX
    )
    (rollbook.folder / "odd.py").write_text(ODD)
    process = rollbook.start("run", str(path), "--json")
    killed = 0
    told = []
    for event in events(process):
        told.append(event)
        if event["event"] == "step" and event["step"] == 11:
            for child in psutil.Process(process.pid).children(recursive=True):
                if "evaluator" in child.cmdline():
                    child.kill()
                    killed += 1
    assert process.wait(timeout=200) == 0
    assert (killed, told[-1]["state"]) == (1, "finished")
    chosen, *answers = rollbook.rows(
        "SELECT version_before AS version FROM steps WHERE step IN (10, 20) "
        "UNION SELECT version FROM runs ORDER BY 1",
        "SELECT environment, sum(groups)::int AS n, max(mean) >= 0.25 AS bonus FROM reward_by_step "
        "GROUP BY 1 ORDER BY 1",
        "SELECT environment, count(*)::int AS n FROM groups GROUP BY 1 ORDER BY 1",
        "SELECT version, n::int FROM evaluation_by_version ORDER BY 1",
        "SELECT count(DISTINCT e.version) AS n FROM evaluations e "
        "WHERE e.at < (SELECT max(applied_at) FROM steps)",
        "SELECT * FROM evaluation_pins",
        "SELECT * FROM ledger_violations",
    )
    groups, drawn, evaluated, meanwhile, pins, violations = answers
    versions = [row["version"] for row in chosen]
    assert [e["version"] for e in told if e["event"] == "evaluation"] == versions
    trained = {row["environment"]: row["n"] for row in groups}
    assert trained["plain"] + trained["odd"] == 120
    assert trained["odd"] in range(27, 31)  # a quarter; the last may still wait for their turn
    assert {row["environment"]: row["n"] for row in drawn}["plain"] == 3 * next(
        row["n"] for row in drawn if row["environment"] == "odd"
    )
    assert [row["bonus"] for row in groups if row["environment"] == "odd"] == [True]
    assert evaluated == [{"version": v, "n": 256} for v in versions]
    assert meanwhile[0]["n"] >= 1
    assert pins == violations == []
    assert "evaluated small@" in rollbook.log("evaluator")
    metrics = [event["metrics"] for event in told if event["event"] == "step"]
    assert all("environment/plain/reward" in step for step in metrics if step)
    json.dumps(metrics)
