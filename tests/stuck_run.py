"""A run in which something is stuck on purpose: the verifier of one task never answers."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import conninfo, sql

from domain.config import RunConfig
from domain.services import Services
from rollbook.launch import Job
from storage import idle, runs
from storage.database import Ledger
from tests import short_run
from tests.short_run import ShortRun

RUN = "stuck3"

SOURCE = """
import threading
import reverse3
from rollbook import PromptSource

def reward(text, task):
    if task.id[0] == "9":
        threading.Event().wait()
    return reverse3.reward(text, task)

source = PromptSource(reward)

def train():
    return [task for task in reverse3.train() if task.id[0] in "1279"]
"""


@dataclass(frozen=True)
class StuckRun(ShortRun):
    """A run that goes on, with rollouts that do not."""

    job: Job

    def command(self, *arguments: str) -> str:
        """What a `rollbook` command prints."""
        done = subprocess.run(
            [sys.executable, "-m", "rollbook", *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def until(happened: Callable[[], object], *, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def stuck_run(
    services: Services, ledger_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StuckRun]:
    """Real processes; some rollouts have been stuck for a second when it is handed out."""
    state = tmp_path_factory.mktemp("stuck-run")
    with psycopg.connect(services.database_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE stuck_run TEMPLATE {}").format(sql.Identifier(ledger_template))
        )
    parts = conninfo.conninfo_to_dict(services.database_url)
    where = f"{parts['host']}:{parts['port']}/stuck_run"
    own = services.model_copy(
        update={
            "database_url": f"postgresql://{parts['user']}:{parts['password']}@{where}",
            "temporal_namespace": "stuck-run",
        }
    )
    table = short_run.configuration(state / "source").model_dump()
    (state / "source" / "faulty.py").write_text(SOURCE)
    table |= {"name": RUN, "steps": 100}
    table["groups"] |= {"oversample": 0, "stuck_after": 1.0}
    config = RunConfig.parse(table)
    ledger = Ledger.open(own.database_url, pool=2, application="stuck run")
    ledger.call(runs.create, config, world={})
    with Job(config, own, state) as job:
        until(
            lambda: any(
                each.state == "running" and each.tokens for each in ledger.call(idle.attempts, RUN)
            ),
            seconds=120,
        )
        yield StuckRun(own, ledger, state, config, "", job)
    ledger.close()
