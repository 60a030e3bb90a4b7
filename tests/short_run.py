"""One real run for everything that looks at runs: six steps of reverse3 on real processes.

Some tasks break, so that there is something to ask about: the reward function of a task with a 7 in
front raises, that of one with an 8 in front raises half the time, and one with a 9 takes a while.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

from domain.config import RunConfig
from domain.services import Services
from rollbook.launch import Job
from storage import reader, runs
from storage.database import Ledger

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = "reverse3"
READER = "short_run_reader"

SOURCE = """
import random
import time
import reverse3
from rollbook import PromptSource

def reward(text, task):
    if task.id[0] == "7" or (task.id[0] == "8" and random.random() < 0.5):
        raise ValueError(f"no verdict for tasks like {task.id}")
    if task.id[0] == "9":
        time.sleep(0.3)
    return reverse3.reward(text, task)

source = PromptSource(reward)

def train():
    return [task for task in reverse3.train() if task.id[0] in "126789"]
"""


@dataclass(frozen=True)
class ShortRun:
    """A finished run, and where to look at it."""

    services: Services
    ledger: Ledger
    state: Path
    config: RunConfig
    reader_url: str

    def environment(self) -> dict[str, str]:
        """For `rollbook` commands as processes."""
        return {**os.environ, **self.services.environment()}


def configuration(folder: Path) -> RunConfig:
    """reverse3, shortened and broken here and there; its module is written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faulty.py").write_text(SOURCE)
    (folder / "reverse3.py").write_bytes((EXAMPLES / "reverse3.py").read_bytes())
    table = RunConfig.load(EXAMPLES / "reverse3.toml").model_dump()
    table |= {"name": RUN, "steps": 6, "root": str(folder), "evaluation": None}
    table["tasks"] |= {"source": "faulty:source", "dataset": "faulty:train", "batch_size": 6}
    table["groups"] |= {"size": 4, "oversample": 1, "max_attempts": 2}
    table["schedule"] |= {"max_empty_batches": 50}
    table["trainer"] |= {"rows": 4, "threads": 1}
    table["checkpoint"] |= {"every": 2}
    table["engine"] |= {"threads": 1}
    return RunConfig.parse(table)


def train(config: RunConfig, services: Services, state: Path, *, seconds: float = 150.0) -> None:
    """Run all processes until the trainer has ended."""
    with Job(config, services, state) as job:
        end = time.monotonic() + seconds
        while job.trainer_ended() is None:
            assert time.monotonic() < end, [str(report) for report in job.supervisor.reports()]
            time.sleep(0.2)


@pytest.fixture(scope="session")
def short_run(
    services: Services, ledger_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ShortRun]:
    """Trained once a session, in a database and a namespace of its own."""
    state = tmp_path_factory.mktemp("short-run")
    database = "short_run"
    with psycopg.connect(services.database_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(database), sql.Identifier(ledger_template)
            )
        )
    url = conninfo.make_conninfo(services.database_url, dbname=database)
    parts = conninfo.conninfo_to_dict(url)
    where = f"{parts['host']}:{parts['port']}/{database}"
    own = services.model_copy(
        update={
            "database_url": f"postgresql://{parts['user']}:{parts['password']}@{where}",
            "temporal_namespace": "short-run",
        }
    )
    config = configuration(state / "source")
    ledger = Ledger.open(own.database_url, pool=2, application="short run")
    ledger.call(runs.create, config, world={})
    train(config, own, state)
    found = ledger.call(runs.read, RUN)
    assert (found.state, found.next_step) == ("finished", 6), found.failure
    ledger.call(reader.grant, READER, "reads")
    yield ShortRun(own, ledger, state, config, f"postgresql://{READER}:reads@{where}")
    ledger.close()
