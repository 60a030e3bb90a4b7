"""What is away for longer than `schedule.max_outage` fails the run with its cause; then it goes on."""

from urllib.parse import urlsplit

import pytest

from tests.chaos.stage import Stage
from tests.outage import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LIMIT_S = 20.0
"""Longer than any of the processes takes to start on a busy machine."""


@pytest.mark.parametrize(
    ("away", "cause"),
    [
        ("temporal", "commands for Temporal are not delivered: "),
        ("ledger", "commands for Temporal are not delivered: no ledger worker leads"),
        ("workflows", "was not served within 20 s"),
        ("rollouts", "no rollout worker takes"),
        ("engine", "no engine is seen"),
    ],
)
def test_a_run_fails_with_the_cause_and_goes_on_when_it_is_mended(
    stage: Stage, away: str, cause: str
) -> None:
    url = urlsplit(f"tcp://{stage.services.temporal_address}")
    with Proxy(str(url.hostname), int(url.port or 0)) as proxy:
        behind = stage.services.model_copy(update={"temporal_address": f"127.0.0.1:{proxy.port}"})
        stage.places |= dict.fromkeys(("workflows", "ledger", "rollouts"), behind)
        # Nothing but the limit may end the wait: a time-out would abandon groups before.
        stage.begin(schedule={"max_outage": LIMIT_S}, groups={"timeout": None})
        stage.start_all()
        stage.until_step(1)
        if away == "temporal":
            proxy.cut()
        else:
            stage.stop(away)
        stage.until(lambda: stage.found().state == "failed", "the run has failed")
        assert cause in str(stage.found().failure)
        assert "rollbook resume" in str(stage.found().failure)
        proxy.mend()
        if away != "temporal":
            stage.start(away)
        stage.until(
            lambda: not any(r.pid for r in stage.supervisor.reports() if r.name == "trainer"),
            "the trainer has ended",
        )
        stage.run_trainer()
        stage.until(lambda: stage.found().state != "failed", "the run is taken up again")
        stage.finish()
        stage.check()
