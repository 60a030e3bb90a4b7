"""The commands beside `run` and `resume`: what they print, for people and for programs."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from rollbook.cli import app
from tests.command_line import Rollbook, events, until_step

pytestmark = pytest.mark.timeout(600)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all commands below a group."""
    for name, below in getattr(command, "commands", {}).items():
        if getattr(below, "commands", None):
            yield from leaves(below, (*path, name))
        else:
            yield (*path, name)


TREE: Any = typer.main.get_command(app)


@pytest.mark.parametrize("path", list(leaves(TREE)), ids=" ".join)
def test_every_command_has_an_example_and_json(path: tuple[str, ...]) -> None:
    command = TREE
    for name in path:
        command = command.commands[name]
    assert command.help
    _, marked, example = command.help.partition("Example: `")
    assert marked
    assert f"rollbook {' '.join(path)}" in example or path == ("failpoints",)
    assert "--json" in [name for option in command.params for name in option.opts]
    assert all(getattr(p, "help", None) for p in command.params), "each parameter is explained"


def test_a_stack_of_its_own_and_a_run_beside_it(rollbook: Rollbook) -> None:
    up = rollbook.json("up", "--detach")
    assert up["temporal_ui"].startswith("http://127.0.0.1:")
    assert up["run_by"] == rollbook.json("up", "--detach")["run_by"]
    assert "is up to date" in rollbook("db", "upgrade")
    assert rollbook.json("db", "check") == {"schema": "matches"}
    assert rollbook.json("status") == []
    assert rollbook.json("create", str(rollbook.configure(steps=10_000))) == {"run": "small"}
    assert rollbook.json("create", "small.toml", "--exists-ok") == {"run": "small"}
    assert "exists already" in rollbook("create", "small.toml", code=2)
    assert "exists already" in rollbook("run", "small.toml", code=2)

    process = rollbook.start("resume", "small", "--json")
    until_step(process, 1)
    held = rollbook("resume", "small", code=2)
    assert "is being trained by" in held
    assert "--force" in held
    assert rollbook.json("pause", "small") == {"run": "small", "state": "paused"}
    facts = rollbook.json("status", "small")
    assert facts["state"] == "paused"
    assert facts["violations"] == []
    assert facts["trainer"]["lease_left"] > 0
    assert rollbook.json("unpause", "small") == {"run": "small", "state": "running"}
    inspected = rollbook.json("inspect", "small")
    assert inspected["data order"]["batch_size"] == 4
    group = rollbook.json("inspect", "small", "0")
    assert len(group["samples"]) >= 4
    assert set(group) == {"group", "samples", "timeline"}
    assert set(rollbook.json("stuck", "small", "--silent", "60")) == {"stuck", "run"}
    assert "small" in rollbook("status")
    assert "balance" in rollbook("status", "small")
    assert "samples" in rollbook("inspect", "small", "0")
    process.send_signal(signal.SIGTERM)
    *_, end = events(process)
    assert process.wait(timeout=200) == 0
    assert end["state"] == "closed"

    (held_out,) = rollbook.json("evaluate", "small", "--dataset", "reverse3:held_out")
    assert held_out["n"] == 256
    assert end["step"] - held_out["version"] in (0, 1)  # the newest that was published
    gone = rollbook("evaluate", "small", "--version", "9999", "--dataset", "x:y", code=2)
    assert f"stored are {held_out['version']}" in gone or f", {held_out['version']}" in gone
    refused = rollbook("sql", "DROP TABLE runs", code=2)
    assert "read-only" in refused
    missing = rollbook("resume", "small", "--from-step", "999", code=2)
    assert "no durable checkpoint 999" in missing
    near = rollbook("status", "smal", code=2)
    assert "small" in near
    assert rollbook.json("down") == {"stopped": True}
    assert rollbook.json("down") == {"stopped": False}


def test_a_stack_in_the_foreground_ends_cleanly_on_sigterm(rollbook: Rollbook) -> None:
    process = rollbook.start("up", "--json")
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            break
    assert json.loads(text)["run_by"] == "this process"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out, err) == (0, "", "")


def test_failpoints_are_listed(rollbook: Rollbook) -> None:
    points = json.loads(rollbook("failpoints", "--json", state=False))
    assert "plan_done" in points


def test_a_process_that_cannot_start_ends_the_run_with_the_end_of_its_log(
    rollbook: Rollbook,
) -> None:
    # Preflight passes here; a worker loads the source again, and there it is another one.
    path = rollbook.configure(steps=3)
    (rollbook.folder / "sitecustomize.py").write_text(
        "import os, sys\nif 'engine' in sys.orig_argv:\n    sys.exit('no such accelerator')\n"
    )
    rollbook.environ["PYTHONPATH"] += f":{rollbook.folder}"
    told = rollbook("run", str(path), code=1)
    assert "a process broke" in told
    assert "engine: exited with status 1" in told
    assert "no such accelerator" in told
