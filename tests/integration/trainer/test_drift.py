"""Engines that sample from other weights than they say pause the run before it learns from them."""

import logging
from pathlib import Path

import pytest

from domain.services import Services
from storage import runs
from storage.database import Ledger
from tests.playing import Fleet, configuration
from tests.trained import create, history, train
from trainer.drift import STEPS


def test_two_steps_of_log_probabilities_that_are_not_the_trainers_pause_the_run(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The played engine makes its numbers up; without a batch ahead every token is of lag 0."""
    run = create(ledger, configuration(name, tmp_path, steps=6, schedule={"ahead": 0}))

    def paused() -> bool:
        return ledger.call(runs.read, run).state == "paused"

    with Fleet(around, tmp_path / "engine") as fleet, caplog.at_level(logging.ERROR):
        train(run, around, fleet, stop=lambda: fleet.broken() or paused())
    assert len(history(ledger, run)) == STEPS
    (said,) = [r.message for r in caplog.records if "is paused" in r.message]
    assert f"`rollbook unpause {run}` goes on" in said
    assert "trainer and engines disagree by" in said
    with ledger.transaction() as tx:
        rows = tx.execute("SELECT metrics FROM steps WHERE run_id = %s", (run,)).fetchall()
    assert all(row["metrics"]["drift/tokens"] > 0 for row in rows)
    assert all(row["metrics"]["drift/mean"] > 0.02 for row in rows)
