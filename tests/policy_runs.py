"""Small real runs on one set of processes: an engine, workers, and the trainer in this process."""

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domain.config import OWN_LOOP, RunConfig
from domain.data import TaskStream
from domain.environments import Env, RolloutView, Source
from domain.rollouts import Task
from domain.services import Services
from rollbook.companions import RolloutThread
from rollbook.launch import Job
from storage import runs
from storage.database import Ledger
from tests.ledger_fixtures import check_invariants
from trainer import loop
from trainer.session import Trained

QUEUE = "policy-runs"
CACHED = """
SELECT s.step, (s.metrics->>'sampling/cached_prompt_fraction')::float8 AS told,
    sum(g.cached_prompt_tokens)::float8 / sum(g.context_start + g.prompt_tokens) AS recorded
FROM steps s JOIN queue q ON (q.run_id, q.step) = (s.run_id, s.step) AND q.state = 'trained'
JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member
JOIN segments g ON (g.run_id, g.group_id, g.sample, g.attempt)
    = (a.run_id, a.group_id, a.sample, a.attempt)
WHERE s.run_id = %(run)s GROUP BY s.step, s.metrics ORDER BY s.step"""
"""Of each step: the share of cached prompt tokens that its record tells, and that of its segments."""


class Wanderer(Env):
    """Turn after turn, each with a pause; how many depends on what was sampled: a long tail."""

    recovery = "stateless"

    def __init__(self, pause: Any) -> None:
        self._pause = pause

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{task.data['n']:04d}" * 4 + "="}]

    async def on_turn(self, rollout: RolloutView) -> list[dict[str, Any]] | None:
        await self._pause()
        said = str(rollout.messages[-1]["content"])
        if rollout.turns >= 2 and said[:1] in "01234":
            return None
        return [{"role": "user", "content": "?="}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        said = "".join(str(m["content"]) for m in rollout.messages if m["role"] == "assistant")
        return said.count("7") / max(1, len(said))

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
        return await self.reward(rollout, task)


@dataclass
class Processes:
    """What runs beside the trainer."""

    services: Services
    ledger: Ledger

    def train(self, steps: int, **sections: Mapping[str, Any]) -> "Run":
        """Train a run to its end; its invariants are checked."""
        config = configuration(steps, **sections)
        self.ledger.call(runs.create, config, world={})
        stream = TaskStream(
            tasks=[Task(f"t{n}", {"n": n}) for n in range(100)],
            batch_size=config.tasks.batch_size,
        )
        seen: list[Trained] = []
        state = loop.run(
            config.name,
            self.services,
            holder=f"{socket.gethostname()}:{os.getpid()}",
            stream=stream,
            watcher=seen.append,
            patience_s=60.0,
        )
        failure = self.ledger.call(runs.read, config.name).failure
        assert state == "finished", failure
        self.ledger.call(check_invariants)
        return Run(config, self.ledger, seen)


@dataclass
class Run:
    """A finished run and what its ledger says."""

    config: RunConfig
    ledger: Ledger
    steps: list[Trained]

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Rows of a query whose `%(run)s` is this run."""
        with self.ledger.transaction() as tx:
            return tx.execute(query, {"run": self.config.name}).fetchall()

    def value(self, query: str) -> Any:
        (row,) = self.rows(query)
        (value,) = row.values()
        return value


def configuration(steps: int, **sections: Mapping[str, Any]) -> RunConfig:
    table: dict[str, Any] = {
        "name": f"p{secrets.token_hex(4)}",
        "steps": steps,
        "tasks": {
            "source": OWN_LOOP,
            "dataset": OWN_LOOP,
            "batch_size": 2,
            "environment": QUEUE,
        },
        "groups": {"size": 4, "timeout": 60.0},
        "schedule": {"ahead": 2, "max_lag": 2},
        "budget": {"max_turns": 6, "max_generated_tokens": 24, "segment_tokens": 2}
        | {"max_turn_tokens": 4},
        "model": {
            "tiny": {"alphabet": "0123456789=?", "dim": 16, "layers": 1, "heads": 2}
            | {"max_positions": 64}
        },
        "trainer": {"width": 64, "rows": 8, "truncation": "score", "lr": 1e-3, "threads": 1},
        "checkpoint": {"every": 4},
    }
    for name, value in sections.items():
        table[name] = {**table.get(name, {}), **value}
    return RunConfig.parse(table)


@contextmanager
def processes(services: Services, state: Path, source: Source) -> Iterator[Processes]:
    """Workers and an engine as children, the rollout worker in a thread of this process."""
    ledger = Ledger.open(services.database_url, pool=2, application="tests")
    job = Job(configuration(1), services, state, trainer=False, rollouts=False)
    # Many runs in turn, where a job's own engine serves the one run it was started for.
    job.services = job.services.model_copy(update={"engines_run": None})
    try:
        with job:
            rollouts = RolloutThread(source, job.services, environment=QUEUE, cache=state / "cache")
            try:
                yield Processes(job.services, ledger)
            finally:
                rollouts.stop()
    finally:
        ledger.close()
