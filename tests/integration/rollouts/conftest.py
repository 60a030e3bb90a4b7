"""A ledger with one run in it, driven by the functions that workers and workflows call."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from activities.chat import Chat
from domain.config import RunConfig
from domain.ids import group_workflow_id
from domain.messages import (
    AttemptIn,
    AttemptRef,
    CloseAttempt,
    FinishGroup,
    GroupVerdict,
    NextAttempt,
)
from domain.rollouts import Segment, Status
from storage import attempts, groups, runs, segments
from storage.database import Ledger
from tests.scripted import printable
from tests.stub_engine import StubEngine, stub_engine


@dataclass
class Bench:
    """One run and short names for what happens to its groups. Groups are submitted at `served`."""

    ledger: Ledger
    config: RunConfig
    url: str
    drawn: int = 0

    @property
    def run(self) -> str:
        return self.config.name

    def sql(self, query: str, *values: Any) -> list[dict[str, Any]]:
        with self.ledger.transaction() as tx:
            cursor = tx.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def one(self, query: str, *values: Any) -> dict[str, Any]:
        (row,) = self.sql(query, *values)
        return row

    def serve(self, version: int, *, trained: bool = True, sha256: bytes = bytes(32)) -> None:
        """Make a version, up to which the trainer has come, the served one."""
        self.sql(
            """INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, state,
            trainer_epoch, served_at) VALUES (%s, %s, %s, 'w', 'served', 1, now())""",
            self.run,
            version,
            sha256,
        )
        if trained:
            self.sql(
                "UPDATE runs SET version = greatest(version, %s), next_step = greatest(next_step, %s)"
                " WHERE run_id = %s",
                version,
                version,
                self.run,
            )

    def group(self, samples: int | None = None, *, task: Mapping[str, Any] | None = None) -> int:
        """A submitted group with the first attempt of each sample, spares included."""
        number, self.drawn = self.drawn, self.drawn + 1
        size = self.config.groups.size + self.config.groups.oversample
        self.sql(
            """INSERT INTO task_batches(run_id, batch, share, tasks, groups, data_position,
            content_sha256) VALUES (%s, %s, 0, 1, 1, '{}', %s)""",
            self.run,
            number,
            bytes(32),
        )
        self.sql(
            """INSERT INTO groups(run_id, group_id, batch, share, pos, task_id, task)
            VALUES (%s, %s, %s, 0, 0, %s, %s)""",
            self.run,
            number,
            number,
            f"t{number}",
            json.dumps({"n": 1} if task is None else dict(task)),
        )
        self.sql(
            """UPDATE groups SET state = 'submitted', workflow_id = %s, submitted_at = now(),
            submitted_version = (SELECT version FROM served WHERE run_id = %s)
            WHERE run_id = %s AND group_id = %s""",
            group_workflow_id(self.run, number, number, 0),
            self.run,
            self.run,
            number,
        )
        self.sql(
            """INSERT INTO attempts(run_id, group_id, sample, attempt, gen, submitted_version)
            SELECT %s, %s, s, 0, 0, version FROM served, generate_series(0, %s) AS s
            WHERE run_id = %s""",
            self.run,
            number,
            (size if samples is None else samples) - 1,
            self.run,
        )
        self.sql(
            "INSERT INTO outbox(run_id, kind, key) VALUES (%s, 'start_group', %s)",
            self.run,
            group_workflow_id(self.run, number, number, 0),
        )
        return number

    def start(self, group: int, sample: int, attempt: int = 0) -> attempts.Started:
        return self.ledger.call(attempts.start, self.key(group, sample, attempt), worker="w1")

    def sampled(
        self,
        group: int,
        sample: int,
        tokens: int = 3,
        *,
        attempt: int = 0,
        version: int | None = None,
        seq: int | None = None,
        logprobs: Sequence[float] | None = None,
    ) -> segments.Progress:
        """Commit one more segment that extends the attempt's only chain by two prompt tokens."""
        row = self.attempt(group, sample, attempt)
        before = self.ledger.call(segments.read, self.run, group, sample, attempt)
        seq = len(before) if seq is None else seq
        known = before[:seq]
        chain = [*map(int, known[-1].prompt_ids), *map(int, known[-1].sampled_ids)] if known else []
        segment = Segment(
            prompt_ids=[*chain, 7, 8],
            sampled_ids=[100 + seq] * tokens,
            logprobs=[-0.5] * tokens if logprobs is None else logprobs,
            finish_reason="stop",
            version=row["pinned_version"] if version is None else version,
        )
        return self.ledger.call(
            segments.append,
            self.run,
            group,
            sample,
            attempt,
            row["fence"],
            segment,
            place=segments.Place(seq=seq, turn=seq, chain=0, context_start=len(chain)),
            engine="http://engine",
        )

    def finish(
        self,
        group: int,
        sample: int,
        reward: float | None = 1.0,
        *,
        attempt: int = 0,
        status: Status = Status.COMPLETED,
        cause: str | None = None,
        fence: int | None = None,
    ) -> AttemptRef:
        fence = self.attempt(group, sample, attempt)["fence"] if fence is None else fence
        return self.ledger.call(
            attempts.finish,
            self.key(group, sample, attempt),
            fence,
            attempts.Ending(status=status, reward=reward, cause=cause),
        )

    def rollout(self, group: int, sample: int, *, attempt: int = 0, **end: Any) -> AttemptRef:
        """A whole rollout of one segment."""
        self.start(group, sample, attempt)
        self.sampled(group, sample, attempt=attempt)
        return self.finish(group, sample, attempt=attempt, **end)

    def fail(
        self, group: int, sample: int, cause: str | None = "infra_error", **more: Any
    ) -> NextAttempt:
        """What follows when an attempt that has not ended does not join."""
        more = {
            "attempt": 0,
            "gen": 0,
            "status": "infra_error" if cause == "infra_error" else "cancelled",
        } | more
        return self.ledger.call(
            groups.close_attempt,
            CloseAttempt(run=self.run, group=group, sample=sample, cause=cause, **more),
        )

    def close(
        self, group: int, outcome: Any = "complete", *, gen: int = 0, **more: Any
    ) -> GroupVerdict:
        return self.ledger.call(
            groups.finish, FinishGroup(run=self.run, group=group, gen=gen, outcome=outcome, **more)
        )

    def key(self, group: int, sample: int, attempt: int = 0) -> AttemptIn:
        return AttemptIn(run=self.run, group=group, sample=sample, attempt=attempt)

    def attempt(self, group: int, sample: int, attempt: int = 0) -> dict[str, Any]:
        return self.one(
            """SELECT * FROM attempts
            WHERE run_id = %s AND group_id = %s AND sample = %s AND attempt = %s""",
            self.run,
            group,
            sample,
            attempt,
        )

    def members(self, group: int) -> list[int]:
        rows = self.sql(
            "SELECT sample FROM attempts WHERE run_id = %s AND group_id = %s AND member ORDER BY 1",
            self.run,
            group,
        )
        return [row["sample"] for row in rows]

    def state(self, group: int) -> str:
        row = self.one(
            "SELECT state FROM groups WHERE run_id = %s AND group_id = %s", self.run, group
        )
        return str(row["state"])

    def queued(self, group: int) -> list[dict[str, Any]]:
        return self.sql(
            "SELECT * FROM queue WHERE run_id = %s AND group_id = %s AND state <> 'expired'"
            " ORDER BY part",
            self.run,
            group,
        )

    def commands(self, kind: str) -> list[str]:
        rows = self.sql(
            "SELECT key FROM outbox WHERE run_id = %s AND kind = %s ORDER BY id", self.run, kind
        )
        return [row["key"] for row in rows]

    def violations(self) -> list[dict[str, Any]]:
        return self.sql("SELECT rule, what FROM ledger_violations WHERE run_id = %s", self.run)

    def lost(self) -> list[dict[str, Any]]:
        """Not empty when a group is in no place, or in two."""
        return self.sql(
            """SELECT * FROM balance WHERE run_id = %s AND (nowhere > 0 OR drawn <> registered
            + submitted + queue + trained + cut + cancelled + abandoned + expired + quarantined)""",
            self.run,
        )


@pytest.fixture(scope="session")
def ledger_url(postgres_url: str, ledger_template: str) -> str:
    """One database for all tests here: each makes runs of its own."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE rollouts TEMPLATE {}").format(sql.Identifier(ledger_template))
        )
    return conninfo.make_conninfo(postgres_url, dbname="rollouts")


@pytest.fixture(scope="session")
def ledger(ledger_url: str) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, pool=12, application="tests")
    yield opened
    opened.close()


@pytest.fixture
def make(ledger: Ledger, ledger_url: str) -> Iterator[Callable[..., Bench]]:
    """Makes a run: `make(groups={"size": 4}, schedule={...})`, version 0 served.

    The invariants of every run are checked when the test ends.
    """
    made: list[Bench] = []

    def create(**sections: Any) -> Bench:
        defaults: dict[str, Any] = {
            "tasks": {"source": "envs:env", "dataset": "envs:tasks", "batch_size": 2},
            "model": {"tiny": {}},
            "groups": {"size": 4, "timeout": 60},
            "schedule": {"order": "deadline", "stale_policy": "resubmit", "max_lag": 2},
        }
        config = RunConfig.parse(
            {"name": f"r{uuid4().hex[:10]}", "steps": 100}
            | {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults}
            | {name: value for name, value in sections.items() if name not in defaults}
        )
        ledger.call(runs.create, config, world={})
        bench = Bench(ledger, config, ledger_url)
        bench.serve(0)
        bench.sql(
            """INSERT INTO checkpoints(run_id, step, version, s3_prefix, manifest_sha256, bytes,
            data_position, rng, world, trainer_epoch) VALUES (%s, 0, 0, 'c', %s, 1, '{}', '{}', '{}', 1)""",
            bench.run,
            bytes(32),
        )
        bench.sql(
            "UPDATE runs SET durable_step = 0, state = 'running' WHERE run_id = %s", bench.run
        )
        made.append(bench)
        return bench

    yield create
    for bench in made:
        assert bench.violations() == []
        assert bench.lost() == []


@pytest.fixture(scope="session")
def printable_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return printable(tmp_path_factory.mktemp("printable"))


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with stub_engine() as stub:
        yield stub


@pytest.fixture
def sampled_run(make: Callable[..., Bench], engine: StubEngine) -> Callable[..., Bench]:
    """Makes a run with ample budgets, whose version 0 the stub engine holds."""

    def create(**sections: Any) -> Bench:
        ample = {
            "budget": {"max_turns": 50, "max_generated_tokens": 5000},
            "trainer": {"width": 20_000},
        }
        b = make(**sections | {name: ample[name] | sections.get(name, {}) for name in ample})
        b.sql(
            """INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
            VALUES (%s, %s, 1, 4, now() + interval '1 hour')""",
            b.run,
            engine.url,
        )
        b.sql(
            """INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256)
            VALUES (%s, %s, 0, 1, %s)""",
            b.run,
            engine.url,
            bytes(32),
        )
        return b

    return create
