"""kill -9 of the whole stack, servers included, then `rollbook resume`: nothing is paid for twice."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from domain.config import RunConfig
from rollbook.stack.stack import Stack
from storage.database import Ledger, Tx
from tests.chaos.stage import Stage
from tests.chaos.walk import pause
from tests.chaos.whole import Whole, write_toml


@dataclass
class Snapshot:
    """What the ledger holds of a run at one moment."""

    run: dict[str, Any]
    attempts: dict[tuple[int, ...], dict[str, Any]]
    segments: dict[tuple[int, ...], bytes]
    replays: int

    @classmethod
    def of(cls, ledger: Ledger) -> "Snapshot":
        def read(tx: Tx) -> "Snapshot":
            (run,) = tx.execute("SELECT next_step, durable_step, version FROM runs").fetchall()
            (steps,) = tx.execute("SELECT coalesce(sum(replays), 0) AS n FROM steps").fetchall()
            return cls(
                run,
                {
                    (a["group_id"], a["sample"], a["attempt"]): a
                    for a in tx.execute("SELECT * FROM attempts")
                },
                {
                    (s["group_id"], s["sample"], s["attempt"], s["seq"]): s["sampled_ids"]
                    for s in tx.execute("SELECT * FROM segments")
                },
                int(steps["n"]),
            )

        return ledger.call(read)


@pytest.mark.timeout(400)
def test_a_whole_stack_killed_in_full_work_loses_at_most_what_was_on_the_wire(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    path = write_toml(root, "whole")
    pause(root, 0.4)
    with Whole.folder() as whole:
        first = whole.rollbook("run", str(path))
        whole.until(whole.in_full_work, "the run is in full work")
        whole.kill(first)
        with (
            Stack.up(whole.state, environ={}) as stack,
            Stage(stack.services, RunConfig.load(path), tmp_path / "stage") as stage,
        ):
            before = Snapshot.of(stage.ledger)
            pause(root, 0.02)
            second = whole.rollbook("resume", "whole")
            taken_up = "SELECT count(*) AS n FROM attempts WHERE state = 'running' AND fence > 1"
            # Sooner than the heartbeat's time-out of a minute: it is known that the worker died.
            stage.until(lambda: stage.value(taken_up), "rollouts are taken up", timeout_s=50)
            stage.finish()
            assert second.wait(60) == 0, whole.log.read_text()[-3000:]
            stage.check()
            after = Snapshot.of(stage.ledger)
    compare(before, after)
    assert before.run["next_step"] > before.run["durable_step"] > 0
    assert after.replays == before.run["next_step"] - before.run["durable_step"]


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
