"""A trainer process of several is killed: its world ends, and another one goes on under the supervisor."""

from pathlib import Path

import psutil
import psycopg
import pytest

from rollbook.stack.stack import Stack
from tests.chaos.walk import pause
from tests.chaos.whole import Whole, write_toml


def ranks(whole: Whole) -> dict[str, psutil.Process]:
    """The trainer processes under the last command, by rank."""
    found = {}
    for process in psutil.Process(whole.commands[-1].pid).children(recursive=True):
        try:
            line, rank = process.cmdline(), process.environ().get("RANK")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "trainer" in line and rank is not None:
            found[rank] = process
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["0", "1", "launcher"])
def test_a_killed_trainer_process_ends_its_world_and_the_run_goes_on(
    tmp_path: Path, victim: str
) -> None:
    root = tmp_path / "root"
    path = write_toml(root, "whole")
    pause(root, 0.1)
    with Whole.folder() as whole:
        command = whole.rollbook("run", str(path), "--ranks", "2")
        whole.until(whole.in_full_work, "the run is in full work")
        world = ranks(whole)
        assert set(world) == {"0", "1"}
        dead = world["0"].parent() if victim == "launcher" else world[victim]
        assert dead is not None
        dead.kill()
        _, alive = psutil.wait_procs(list(world.values()), timeout=30)
        assert not alive, "a rank outlives its world"
        pause(root, 0.02)
        assert command.wait(400) == 0, whole.log.read_text()[-3000:]
        with (
            Stack.up(whole.state, environ={}) as stack,
            psycopg.connect(stack.services.database_url, options="-c search_path=ledger") as ledger,
        ):
            assert ledger.execute(QUESTION).fetchall() == [("finished", 2, 9, True, 0)]


QUESTION = """
SELECT state, trainer_epoch, next_step, (SELECT sum(replays) > 0 FROM steps),
    (SELECT count(*) FROM ledger_violations) FROM runs
"""
