"""kill -9 of every process of a running run."""

import pytest

from tests.chaos.stage import Stage, pause


@pytest.mark.timeout(300)
def test_every_process_dies_once_and_the_run_ends_as_if_none_had(stage: Stage) -> None:
    pause(stage.folder / "root", 0.2)
    stage.start_all()
    for step, name in enumerate(("rollouts", "workflows", "ledger", "engine")):
        stage.until_step(step)
        if name == "rollouts":
            stage.until_rollouts_run()
        stage.kill(name)
    stage.kill("trainer")
    stage.finish()
    stage.check()
