"""Fifty rollouts in flight are cancelled: ledger, outbox, workflow, activity and engine, all real.

By a person, by their time limit, by the lag bound. Each of their requests is a long one, so what is
cancelled is in the middle of its sampling; the engine must be idle soon, and what it had sampled must
stand in the ledger.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from domain.config import RunConfig
from domain.data import TaskStream
from domain.environments import Outcome, Recorder
from domain.rollouts import Status, Task
from domain.services import Services
from storage import runs
from storage.database import Ledger, upgrade
from storage.objects import ObjectStore
from tests.policy_runs import configuration, processes
from trainer import loop

GROUPS, SIZE = 2, 25
ROLLOUTS = GROUPS * SIZE
MANY = 10
"""The others came to the end of a request before the cancel did: more of them on a busy machine."""
LONG = 4096
"""Tokens of a request."""
PROMPT = [0, 1, 2, 3]
IDLE_S = 15.0
"""From the moment when the rollouts are told until the engine has nothing to do: within 3 s on a
machine of its own (the log says how long it took); a test may share its cores with anything."""
GENEROUS_S = 30.0
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 1200)))
"""A network that knows nothing ends a turn once in so many tokens: requests are long."""
log = logging.getLogger(__name__)


class Talker:
    """Talks on for ever. A short task says four tokens; a rollout that is tried again hangs before it
    samples anything."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        self._begun[task.id] += 1
        if task.data["short"]:
            said = await recorder.sample(PROMPT, max_tokens=4)
            return Outcome(status=Status.COMPLETED, reward=float(said.sampled_ids[0] % 2))
        if self._begun[task.id] > SIZE:
            await asyncio.Event().wait()
        heard = PROMPT
        while True:
            said = await recorder.sample(heard, max_tokens=LONG)
            heard = [*said.prompt_ids, *said.sampled_ids, *PROMPT]


class Scene:
    """A run in progress and what its ledger and engine say."""

    def __init__(self, config: RunConfig, ledger: Ledger, engine: str, ending: Future[str]) -> None:
        self.run = config.name
        self.ledger = ledger
        self.engine = engine
        self.ending = ending

    def busy(self) -> int:
        """Requests that the engine runs or keeps waiting."""
        told = httpx.get(f"{self.engine}/health", timeout=30).json()
        return int(told["running"]) + int(told["waiting"])

    def value(self, query: str) -> Any:
        with self.ledger.transaction() as tx:
            row = tx.execute(query, {"run": self.run}).fetchone()
        assert row is not None
        (value,) = row.values()
        return value

    def count(self, where: str) -> int:
        return int(
            self.value(f"SELECT count(*) AS n FROM attempts a WHERE run_id = %(run)s AND {where}")
        )

    def wait_idle(self, within_s: float) -> None:
        began = time.monotonic()
        wait(lambda: self.busy() == 0, within_s)
        log.info("the engine was idle after %.2f s", time.monotonic() - began)

    def recorded(self) -> tuple[int, int]:
        """Cancelled attempts whose tokens stand in the ledger, and how many of them were cut short
        within a request; the others happened to be between two."""
        ended = "status = 'cancelled' AND policy_tokens > 0 AND NOT member"
        return self.count(ended), self.count(
            f"{ended} AND (SELECT finish_reason = 'abort' AND tokens > 0 FROM segments s WHERE "
            "(s.run_id, s.group_id, s.sample, s.attempt) = (a.run_id, a.group_id, a.sample, "
            "a.attempt) ORDER BY seq DESC LIMIT 1)"
        )


LIVE = "state IN ('submitted', 'running')"
REQUESTING = "state = 'running' AND cancel_cause IS NULL AND started_at < now() - interval '2 s'"


@contextmanager
def scene(
    services: Services, folder: Path, short: int, **sections: Mapping[str, Any]
) -> Iterator[Scene]:
    """Two groups of 25 endless rollouts, and `short` groups that end at once, beside them."""
    upgrade(services.database_url)
    ObjectStore(services).prepare()
    tiny = {"alphabet": ALPHABET, "dim": 32, "layers": 2, "heads": 2, "max_positions": 16384}
    tables: dict[str, Mapping[str, Any]] = {
        "tasks": {"batch_size": GROUPS},
        "groups": {"size": SIZE, "timeout": 600.0},
        "schedule": {
            "order": "dataset",
            "stale_policy": "resubmit",
            "ahead": 0,
            "max_lag": 0,
            "max_empty_batches": 0,
        },
        "budget": {
            "max_turns": 100_000,
            "max_generated_tokens": 100_000,
            "segment_tokens": LONG,
            "max_turn_tokens": None,
        },
        "model": {"tiny": tiny},
        "trainer": {"width": 16384, "truncation": "mask"},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    config = configuration(100, **tables)
    endless = [Task(f"long{n}", {"short": False}) for n in range(GROUPS)]
    brief = [Task(f"short{n}", {"short": True}) for n in range(short)]
    with (
        processes(services, folder, Talker()) as running,
        ThreadPoolExecutor(1) as trainer,
    ):
        running.ledger.call(runs.create, config, world={})
        stream = TaskStream(
            tasks=[*endless, *brief], batch_size=config.tasks.batch_size, epochs=1, shuffle=False
        )
        ending = trainer.submit(
            loop.run, config.name, running.services, holder="here:1", stream=stream
        )
        (engine,) = running.services.engines
        it = Scene(config, running.ledger, engine, ending)
        try:
            yield it
        finally:
            running.ledger.call(runs.fail, config.name, "cancelled by the test")
            ending.result(60)


def wait(holds: Callable[[], bool], within_s: float) -> None:
    give_up = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_ended_leaves_the_engine_idle_and_its_partial_output_recorded(
    services: Services, tmp_path: Path
) -> None:
    with scene(services, tmp_path, short=0) as s:
        wait(lambda: s.count(REQUESTING) == ROLLOUTS and s.busy() == ROLLOUTS, 120)
        s.ledger.call(runs.fail, s.run, "cancelled by the test")
        s.wait_idle(IDLE_S)
        wait(lambda: s.count(LIVE) == 0, GENEROUS_S)
        assert s.ending.result(60) == "failed"
        everyone, cut_short = s.recorded()
        assert everyone == ROLLOUTS
        assert cut_short >= MANY


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollouts_that_run_out_of_time_leave_the_engine_idle_and_their_partial_output_recorded(
    services: Services, tmp_path: Path
) -> None:
    limit_s = 75.0
    with scene(services, tmp_path, short=0, groups={"timeout": limit_s, "max_attempts": 2}) as s:
        wait(lambda: s.count(REQUESTING) == ROLLOUTS and s.busy() == ROLLOUTS, limit_s)
        left = limit_s - float(
            s.value(
                "SELECT extract(epoch FROM now() - max(begun_at)) AS s FROM groups "
                "WHERE run_id = %(run)s"
            )
        )
        assert left > 2
        time.sleep(left - 1)
        s.wait_idle(1 + IDLE_S)
        again = "resubmitted_as = 'timeout' AND counts_as_failure"
        wait(lambda: s.count(again) == ROLLOUTS, GENEROUS_S)
        everyone, cut_short = s.recorded()
        assert everyone == ROLLOUTS
        assert cut_short >= MANY


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollouts_past_the_lag_bound_leave_the_engine_idle_and_their_partial_output_recorded(
    services: Services, tmp_path: Path
) -> None:
    schedule = {"order": "admission", "ahead": 2, "max_lag": 2}
    trainer = {"overflow": "accumulate", "estimator": "mean"}
    with scene(
        services, tmp_path, 6, tasks={"batch_size": 1}, schedule=schedule, trainer=trainer
    ) as s:
        stale = "cancel_cause = 'stale'"
        wait(lambda: s.count(stale) > 0, 240)
        s.wait_idle(IDLE_S)
        again = f"{stale} AND resubmitted_as = 'stale' AND NOT counts_as_failure"
        wait(lambda: s.count(again) == ROLLOUTS, GENEROUS_S)
        everyone, cut_short = s.recorded()
        assert everyone == ROLLOUTS
        assert cut_short >= MANY
