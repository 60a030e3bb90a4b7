"""Processes whose clocks are wrong: leases, fences, time limits and ages are the servers' alone."""

import pytest

from tests.chaos.stage import Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HOUR_S = 3600.0
SIGNABLE_S = 600.0
"""Object stores refuse signatures that are a quarter of an hour old, as they should: of all but the
workflow workers, which sign nothing."""


@pytest.mark.parametrize("sign", [1, -1], ids=["ahead", "behind"])
def test_no_invariant_depends_on_the_clock_of_a_process(stage: Stage, sign: int) -> None:
    stage.clocks = {
        "rollouts": sign * SIGNABLE_S,
        "workflows": -sign * HOUR_S,
        "ledger": sign * SIGNABLE_S,
        "engine": -sign * SIGNABLE_S,
        "trainer": sign * SIGNABLE_S,
    }
    stage.pause(0.1)
    stage.start_all()
    stage.until_step(1)
    stage.until_rollouts_run()
    stage.kill("rollouts")
    stage.kill("trainer")
    stage.finish()
    stage.check()
    lost = "SELECT coalesce(sum(losses), 0) FROM groups WHERE run_id = %s"
    assert stage.value(lost, stage.run) == 0
