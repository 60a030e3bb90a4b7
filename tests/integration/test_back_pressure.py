"""A trainer that stands still makes everything before it wait: nothing is lost, and nobody goes silent."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from domain.config import RunConfig
from domain.services import Services
from rollbook.launch import Job
from storage import runs
from storage.database import Ledger
from tests.short_run import configuration

SOURCE = """
import time
from pathlib import Path

import reverse3
from rollbook import PromptSource

STANDING = Path(__file__).with_name("standing")

def reward(text, task):
    while STANDING.exists():  # some rollouts are in the middle of something
        time.sleep(0.05)
    return reverse3.reward(text, task)

source = PromptSource(reward)
"""
SILENT_S = 5.0
"""Workers give a sign of life twice a second."""


def unhurried(folder: Path) -> RunConfig:
    config = configuration(folder)
    (folder / "unhurried.py").write_text(SOURCE)
    table = config.model_dump() | {"steps": 8}
    table["tasks"] |= {"source": "unhurried:source", "dataset": "reverse3:train"}
    return RunConfig.parse(table)


def until(what: str, true: Callable[[], bool], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.1)


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def silences(services: Services, workflow_ids: list[str]) -> list[float]:
    """Seconds since the last sign of life of each attempt that runs."""
    client = await Client.connect(services.temporal_address, namespace=services.temporal_namespace)
    found = []
    for workflow_id in workflow_ids:
        try:
            told = await client.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            continue  # not delivered yet: nobody runs there
        for activity in told.raw_description.pending_activities:
            if activity.HasField("last_heartbeat_time"):
                heard = activity.last_heartbeat_time.ToDatetime(tzinfo=UTC)
                found.append((datetime.now(UTC) - heard).total_seconds())
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [6.0, pytest.param(120.0, marks=pytest.mark.slow)])
async def test_a_trainer_that_stands_still_loses_nothing_and_silences_nobody(
    services: Services, ledger_url: str, ledger: Ledger, tmp_path: Path, seconds: float
) -> None:
    own = services.model_copy(update={"database_url": ledger_url})
    config = unhurried(tmp_path / "source")
    standing = tmp_path / "source" / "standing"
    ledger.call(runs.create, config, world={})

    def ask(query: str) -> Any:
        with ledger.transaction() as tx:
            return tx.execute(query.encode()).fetchall()

    def live() -> int:
        return int(
            ask("SELECT count(*) AS n FROM attempts WHERE state IN ('submitted', 'running')")[0][
                "n"
            ]
        )

    with Job(config, own, tmp_path / "state") as job:
        until("two steps are trained", lambda: ledger.call(runs.read, config.name).next_step >= 2)
        standing.touch()
        (pid,) = [r.pid for r in job.supervisor.reports() if r.name == "trainer"]
        assert pid is not None
        with standing_still(pid):
            began = time.monotonic()
            longest = 0.0
            while time.monotonic() < began + seconds / 2:
                groups = ask("SELECT workflow_id FROM groups WHERE state = 'submitted'")
                heard = await silences(own, [row["workflow_id"] for row in groups])
                longest = max(longest, *heard, 0.0)
                time.sleep(0.5)  # noqa: ASYNC251 - nothing else runs in this loop
            assert live() > 0
            assert longest < SILENT_S
            standing.unlink()
            until("all rollouts have ended and the queue is full", lambda: live() == 0)
            while time.monotonic() < began + seconds:
                time.sleep(0.2)  # noqa: ASYNC251
            waiting = ask("SELECT group_id, part FROM queue WHERE state IN ('admitted', 'planned')")
            assert len(waiting) >= config.tasks.batch_size
            assert (
                ask("SELECT registered + submitted AS n FROM balance")[0]["n"] <= waiting.__len__()
            )
            still = ledger.call(runs.read, config.name)
        until("the run has finished", lambda: job.trainer_ended() is not None, seconds=120)
        assert [r.restarts for r in job.supervisor.reports() if r.name != "trainer"] == [0] * 4
    found = ledger.call(runs.read, config.name)
    assert (found.state, found.epoch) == ("finished", still.epoch), found.failure
    trained = ask("SELECT group_id, part FROM queue WHERE state = 'trained'")
    assert {(r["group_id"], r["part"]) for r in waiting} <= {
        (r["group_id"], r["part"]) for r in trained
    }
    assert ask("SELECT * FROM attempts WHERE resubmitted_as IS NOT NULL OR state = 'lost'") == []
