"""Whole runs through the command line: to the end, interrupted, killed, rewound."""

import json
import signal

import pytest

from tests.command_line import Rollbook, events, kill_everything, until_step

pytestmark = pytest.mark.timeout(600)

TWICE = (
    "SELECT group_id FROM queue WHERE state IN ('applied', 'trained') "
    "GROUP BY run_id, group_id, part HAVING count(*) > 1"
)
DIGESTS = "SELECT step, encode(weights_sha256, 'hex') AS digest FROM steps "
DIGESTS += "WHERE run_id = 'small' AND state <> 'planned' ORDER BY step"

DURABLE = "SELECT step FROM checkpoints WHERE run_id = 'small' AND state = 'durable' AND step < 6"


def sound(rollbook: Rollbook) -> None:
    """Nothing is trained twice, and the ledger holds together."""
    assert rollbook.rows(TWICE, "SELECT * FROM ledger_violations") == [[], []]


def test_a_run_ends_and_tells_what_it_did(rollbook: Rollbook) -> None:
    more = '\n[evaluation]\ndataset = "reverse3:held_out"\nevery = 2\n'
    told = [
        json.loads(line)
        for line in rollbook(
            "run", str(rollbook.configure(steps=4, more=more)), "--json"
        ).splitlines()
    ]
    kinds = [event["event"] for event in told]
    assert kinds == ["start", *["step"] * 4, *["evaluation"] * 2, "end"]
    assert told[-1] | {"failure": None} == {
        "event": "end",
        "run": "small",
        "state": "finished",
        "step": 4,
        "failure": None,
    }
    assert [e["version"] for e in told if e["event"] == "evaluation"] == [2, 4]
    assert all(e["n"] == 256 for e in told if e["event"] == "evaluation")
    # Everything is down now; the ledger is read all the same, with Postgres alone.
    (row,) = rollbook.json("status")
    assert (row["run"], row["state"], row["trained"]) == ("small", "finished", 16)
    assert not (rollbook.state / "services.json").exists()
    sound(rollbook)


def test_ctrl_c_closes_a_run_and_resume_ends_it(rollbook: Rollbook) -> None:
    process = rollbook.start("run", str(rollbook.configure(steps=6, every=4)), "--json")
    until_step(process, 1)
    process.send_signal(signal.SIGINT)
    *_, end = events(process)
    assert process.wait(timeout=200) == 0
    assert (end["event"], end["state"]) == ("end", "closed")
    (row,) = rollbook.json("status")
    assert row["durable_step"] == row["step"] == end["step"]  # a stop saves everything
    resumed = [json.loads(line) for line in rollbook("resume", "small", "--json").splitlines()]
    steps = [event["step"] for event in resumed if event["event"] == "step"]
    assert steps == list(range(end["step"], 6))
    assert resumed[-1]["state"] == "finished"
    sound(rollbook)


def test_a_run_whose_every_process_is_killed_goes_on_to_the_same_weights(
    rollbook: Rollbook,
) -> None:
    process = rollbook.start("run", str(rollbook.configure(steps=6, every=4)), "--json")
    until_step(process, 2)
    kill_everything(process)
    before = {row["step"]: row["digest"] for row in rollbook.rows(DIGESTS)[0]}
    assert set(before) >= {0, 1, 2}
    last = [json.loads(line) for line in rollbook("resume", "small", "--json").splitlines()][-1]
    assert (last["state"], last["step"]) == ("finished", 6)
    # The trainer compares what it recomputes with the digests of the steps it lost.
    assert "replayed step 2" in rollbook.log("trainer")
    after = {row["step"]: row["digest"] for row in rollbook.rows(DIGESTS)[0]}
    assert after | before == after
    sound(rollbook)
    # Back to a durable step, as a run of its own. (A trainer that waits for long saves one early.)
    base = max(row["step"] for row in rollbook.rows(DURABLE)[0])
    assert base >= 3
    told = [
        json.loads(line)
        for line in rollbook("resume", "small", "--from-step", str(base), "--json").splitlines()
    ]
    assert (told[-1]["run"], told[-1]["state"], told[-1]["step"]) == ("small.2", "finished", 6)
    steps = [event["step"] for event in told if event["event"] == "step"]
    assert steps == list(range(base, 6))
    sound(rollbook)
