"""Fifty rollouts in flight are cancelled: ledger, outbox, workflow, activity and engine, all real."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from domain.config import OWN_LOOP
from domain.data import TaskStream
from domain.environments import Env, RolloutView
from domain.rollouts import Task
from domain.services import Services
from storage import runs
from storage.database import Ledger, upgrade
from storage.objects import ObjectStore
from tests.policy_runs import configuration, processes
from trainer import loop

ROLLOUTS = 50
log = logging.getLogger(__name__)
GENEROUS_S = 15.0
"""The engine is idle within 3 s on a machine of its own; here it shares two cores with the tests."""


class Talker(Env):
    """Never ends by itself."""

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "0123="}]

    async def on_turn(self, rollout: RolloutView) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "?="}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_rollouts_cancelled_in_flight_leave_the_engine_idle_and_their_tokens_recorded(
    services: Services, tmp_path: Path
) -> None:
    upgrade(services.database_url)
    ObjectStore(services).prepare()
    config = configuration(
        1,
        tasks={"batch_size": 5},
        groups={"size": 10, "timeout": 600.0},
        schedule={
            "order": "dataset",
            "stale_policy": "resubmit",
            "ahead": 0,
            "max_lag": 0,
            "max_empty_batches": 0,
        },
        budget={
            "max_turns": 100_000,
            "max_generated_tokens": 100_000,
            "segment_tokens": 1000,
            "max_turn_tokens": None,
        },
        model={"tiny": {**configuration(1).model.model_dump()["tiny"], "max_positions": 4096}},
        trainer={"width": 4096, "truncation": "mask"},
    )
    assert config.tasks.source == OWN_LOOP
    with (
        processes(services, tmp_path, Talker()) as running,
        ThreadPoolExecutor(1) as trainer,
    ):
        ledger = running.ledger
        ledger.call(runs.create, config, world={})
        stream = TaskStream(tasks=[Task(f"t{n}", {}) for n in range(5)], batch_size=5)
        ending = trainer.submit(
            loop.run, config.name, running.services, holder="here:1", stream=stream
        )
        wait(lambda: sampling(ledger, config.name) == ROLLOUTS, 120)
        (engine,) = running.services.engines
        assert busy(engine) > 0
        ledger.call(runs.fail, config.name, "cancelled by the test")
        told = time.monotonic()
        wait(lambda: busy(engine) == 0, GENEROUS_S)
        log.info("idle %.2f s after %d were cancelled", time.monotonic() - told, ROLLOUTS)
        wait(lambda: live(ledger, config.name) == 0, GENEROUS_S)
        assert ending.result(60) == "failed"
        assert recorded(ledger, config.name) == ROLLOUTS


def busy(engine: str) -> int:
    """Requests that an engine runs or keeps waiting."""
    told = httpx.get(f"{engine}/health", timeout=30).json()
    return int(told["running"]) + int(told["waiting"])


def wait(holds: Callable[[], bool], within_s: float) -> None:
    give_up = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def count(ledger: Ledger, run: str, where: str) -> int:
    with ledger.transaction() as tx:
        row = tx.execute(
            f"SELECT count(*) AS n FROM attempts WHERE run_id = %s AND {where}",
            (run,),
        ).fetchone()
    assert row is not None
    return int(row["n"])


def sampling(ledger: Ledger, run: str) -> int:
    """Attempts that run, are not cancelled, and have tokens in the ledger."""
    return count(ledger, run, "state = 'running' AND cancel_cause IS NULL AND policy_tokens > 0")


def live(ledger: Ledger, run: str) -> int:
    return count(ledger, run, "state IN ('submitted', 'running')")


def recorded(ledger: Ledger, run: str) -> int:
    """Cancelled attempts whose tokens stand in the ledger."""
    return count(ledger, run, "status = 'cancelled' AND policy_tokens > 0 AND NOT member")
