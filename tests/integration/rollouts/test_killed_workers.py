"""Rollout workers as processes of their own, under a real Temporal server, killed with SIGKILL."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from psycopg import conninfo
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from activities.inference import EngineClient
from activities.payloads import MESSAGES
from domain.ids import policy_name
from domain.messages import AttemptIn, AttemptRef
from domain.services import Services
from storage import manifests, segments
from storage.objects import ObjectStore
from tests.integration.engine.lab import GPT2, Weights, running_engine
from tests.outage import Proxy
from tests.stub_engine import StubEngine, stub_engine

Make = Callable[..., Any]

WORKER = Path(__file__).parents[2] / "rollout_worker.py"

SOURCE = '''
import os

from domain.environments import Env


class Walk(Env):
    """Four turns; what they do to the world is one line each."""

    def __init__(self, recovery):
        self.recovery = recovery

    async def reset(self, task):
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout):
        with open(os.environ.get("WORLD", os.devnull), "a") as world:
            world.write(f"{rollout.turns} ")
        return None if rollout.turns == 4 else [{"role": "user", "content": "w6"}]

    async def snapshot(self, rollout):
        return rollout.turns

    async def restore(self, rollout, state):
        assert state == rollout.turns

    async def reward(self, rollout, task):
        return float(rollout.turns)


drop, stateless, snapshot = Walk("drop"), Walk("stateless"), Walk("snapshot")
'''


@workflow.defn(sandboxed=False)
class OneAttempt:
    """One attempt with the options of a group's attempts, on scaled time limits."""

    @workflow.run
    async def run(self, i: AttemptIn) -> AttemptRef:
        result: AttemptRef = await workflow.execute_activity(
            "run_attempt",
            i,
            result_type=AttemptRef,
            task_queue=workflow.info().task_queue + "-rollouts",
            start_to_close_timeout=timedelta(seconds=60),
            heartbeat_timeout=timedelta(seconds=2),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=100), maximum_attempts=3
            ),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
        return result


@dataclass
class Place:
    """A queue with a workflow worker in this process and rollout workers beside it."""

    client: Client
    services: Services
    cache: Path
    queue: str = field(default_factory=lambda: f"q{uuid4().hex[:8]}")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_worker(self, **variables: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, str(WORKER), f"{self.queue}-rollouts", str(self.cache)],
            env=os.environ | self.services.environment() | variables,
        )
        self.processes.append(process)
        return process

    async def begin(self, i: AttemptIn) -> "WorkflowHandle[OneAttempt, AttemptRef]":
        return await self.client.start_workflow(
            OneAttempt.run, i, id=f"one-{uuid4().hex}", task_queue=self.queue
        )


def model_files() -> dict[str, bytes]:
    words = {"</s>": 0} | {f"w{n}": n for n in range(1, 24)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode(),
        "config.json": json.dumps({"eos_token_id": 0}).encode(),
    }


@pytest.fixture
def near(ledger_url: str, temporal_address: str, s3_services: Services) -> Services:
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(
        update={
            "database_url": ledger_url,
            "temporal_address": temporal_address,
            "temporal_namespace": "rollbook",
        }
    )


@pytest.fixture
async def place(near: Services, tmp_path: Path) -> AsyncIterator[Place]:
    client = await Client.connect(
        near.temporal_address,
        namespace=near.temporal_namespace,
        data_converter=MESSAGES,
    )
    here = Place(client, near, tmp_path / "models")
    worker = Worker(
        client,
        task_queue=here.queue,
        workflows=[OneAttempt],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        yield here
        for process in here.processes:
            process.kill()
            process.wait()


@pytest.fixture
def walk(make: Make, near: Services, tmp_path: Path) -> Callable[..., Any]:
    """Makes a run whose source is `Walk`, with its tokenizer in the object store."""

    def create(recovery: str, **sections: Any) -> Any:
        module = f"walk_{uuid4().hex[:8]}"
        (tmp_path / f"{module}.py").write_text(SOURCE)
        b = make(
            tasks={"source": f"{module}:{recovery}", "dataset": "envs:tasks", "batch_size": 2},
            root=str(tmp_path),
            **sections,
        )
        files = model_files()
        digest = hashlib.sha256(b"".join(files.values())).hexdigest()
        stored = manifests.upload(
            ObjectStore(near), f"models/{digest}", files, kind="model", sha256=digest
        )
        b.sql(
            "UPDATE runs SET config = jsonb_set(config, '{world}', %s::jsonb) WHERE run_id = %s",
            json.dumps({"model_manifest": stored.manifest_key}),
            b.run,
        )
        return b

    return create


@pytest.fixture
async def stub() -> AsyncIterator[StubEngine]:
    async with stub_engine() as engine:
        yield engine


def engines(b: Any, url: str, version: int = 0) -> None:
    b.sql(
        """INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
        VALUES (%s, %s, 1, 4, now() + interval '1 hour')""",
        b.run,
        url,
    )
    b.sql(
        """INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256)
        VALUES (%s, %s, %s, 1, %s)""",
        b.run,
        url,
        version,
        bytes(32),
    )


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


def check_resumed(b: Any, group: int, ref: AttemptRef) -> None:
    """One attempt, no failure, every turn once, and no segment of the dead execution after it."""
    assert (ref.attempt, ref.status, ref.reward, ref.turns) == (0, "completed", 4.0, 4)
    row = b.attempt(group, 0)
    assert (row["member"], row["counts_as_failure"]) == (True, False)
    stored = b.sql(
        "SELECT seq, tokens, fence FROM segments WHERE run_id = %s AND group_id = %s ORDER BY seq",
        b.run,
        group,
    )
    assert [s["seq"] for s in stored] == [0, 1, 2, 3]
    assert [s["fence"] for s in stored] == sorted(s["fence"] for s in stored)
    assert sum(s["tokens"] for s in stored) == row["policy_tokens"]
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    for before, after in pairwise(read):
        ids = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(ids)] == ids


@pytest.mark.parametrize("recovery", ["stateless", "snapshot"])
async def test_killed_in_the_middle_of_a_request(
    walk: Callable[..., Any], place: Place, stub: StubEngine, recovery: str, tmp_path: Path
) -> None:
    world = tmp_path / "world"
    b = walk(recovery)
    engines(b, stub.url)
    group = b.group()
    stub.hold, stub.hold_from = asyncio.Event(), 2
    first = place.start_worker(WORLD=str(world))
    handle = await place.begin(b.key(group, 0))
    await until(lambda: stub.running)
    os.kill(first.pid, signal.SIGKILL)
    place.start_worker(WORLD=str(world))
    await until(lambda: len(stub.requests) > 3)
    stub.hold.set()
    check_resumed(b, group, await handle.result())
    assert world.read_text().split() == ["1", "2", "3", "4"]  # nothing was done twice


@pytest.mark.parametrize(
    ("point", "requests"),
    [
        ("attempt_started", 4),
        ("segment_sampled:3", 5),  # what was not committed is sampled again, with the same seed
        ("segment_done:2", 4),
        ("attempt_finished", 4),
    ],
)
async def test_killed_at_a_failpoint(
    walk: Callable[..., Any], place: Place, stub: StubEngine, point: str, requests: int
) -> None:
    b = walk("stateless")
    engines(b, stub.url)
    group = b.group()
    first = place.start_worker(FAILPOINT=point)
    handle = await place.begin(b.key(group, 0))
    await until(lambda: first.poll() is not None)
    assert first.returncode == 137
    place.start_worker()
    check_resumed(b, group, await handle.result())
    assert len(stub.requests) == requests
    seeds = [r["sampling_params"]["seed"] for r in stub.requests]
    assert len(set(seeds)) == 4


async def test_killed_before_its_start_is_committed(
    walk: Callable[..., Any], place: Place, stub: StubEngine
) -> None:
    """Temporal has given the attempt to a worker, and the ledger knows nothing of it yet."""
    b = walk("drop")
    engines(b, stub.url)
    group = b.group()
    waiting = """SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
        AND wait_event_type = 'Lock'"""
    with b.ledger.transaction() as tx:
        tx.execute("SELECT 1 FROM attempts WHERE run_id = %s FOR UPDATE", (b.run,))
        first = place.start_worker()
        handle = await place.begin(b.key(group, 0))
        await until(lambda: b.sql(waiting))
        first.kill()
        first.wait()
    place.start_worker()
    check_resumed(b, group, await handle.result())
    assert b.attempt(group, 0)["fence"] == 1
    tries = "SELECT count(*) AS n FROM attempts WHERE run_id = %s AND sample = 0"
    assert b.sql(tries, b.run)[0]["n"] == 1


async def test_a_rollout_that_cannot_resume_is_lost_and_not_a_failure(
    walk: Callable[..., Any], place: Place, stub: StubEngine
) -> None:
    b = walk("drop")
    engines(b, stub.url)
    group = b.group()
    first = place.start_worker(FAILPOINT="segment_done:2")
    handle = await place.begin(b.key(group, 0))
    await until(lambda: first.poll() is not None)
    place.start_worker()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    error = caught.value.cause
    assert isinstance(error, ActivityError)
    assert isinstance(error.cause, ApplicationError)
    assert error.cause.type == "LOST"
    assert b.fail(group, 0, lost=True).next_attempt == 1
    assert not b.attempt(group, 0)["counts_as_failure"]


async def test_a_lost_ledger_connection_loses_no_rollout_that_cannot_resume(
    walk: Callable[..., Any], place: Place, stub: StubEngine
) -> None:
    b = walk("drop")
    engines(b, stub.url)
    group = b.group()
    lost: list[bytes] = []

    def lose_the_second_insert(answer: bytes) -> bytes:
        lost.extend([answer] if b"INSERT 0 1" in answer else [])
        if len(lost) == 2:
            lost.append(b"lost")
            raise ConnectionResetError
        return answer

    url = place.services.database_url
    address = conninfo.conninfo_to_dict(url)
    with Proxy(str(address["host"]), int(address["port"] or 5432)) as line:
        line.alter(lose_the_second_insert)
        through = conninfo.make_conninfo(url, host="127.0.0.1", port=line.port)
        place.start_worker(ROLLBOOK_DATABASE_URL=through)
        ref = await (await place.begin(b.key(group, 0))).result()
    assert len(lost) > 2
    assert (ref.attempt, ref.status, ref.turns) == (0, "completed", 4)
    assert b.attempt(group, 0)["fence"] == 1  # one execution from its start to its end


async def test_a_cancel_in_temporal_reaches_the_engine_within_three_seconds(
    walk: Callable[..., Any], place: Place, stub: StubEngine
) -> None:
    b = walk("drop")
    engines(b, stub.url)
    group = b.group()
    stub.hold = asyncio.Event()
    place.start_worker()
    handle = await place.begin(b.key(group, 0))
    await until(lambda: stub.running)
    await handle.cancel()
    asked = time.monotonic()
    await until(lambda: not stub.running)
    assert time.monotonic() - asked < 3
    with contextlib.suppress(WorkflowFailureError):
        await handle.result()
    row = b.attempt(group, 0)
    assert (row["state"], row["status"], row["policy_tokens"]) == ("finished", "cancelled", 2)


async def test_a_terminated_worker_hands_its_rollout_on(
    walk: Callable[..., Any], place: Place, stub: StubEngine
) -> None:
    b = walk("stateless")
    engines(b, stub.url)
    group = b.group()
    stub.hold, stub.hold_from = asyncio.Event(), 1
    first = place.start_worker()
    handle = await place.begin(b.key(group, 0))
    await until(lambda: stub.running)
    first.send_signal(signal.SIGINT)  # the worker's own shutdown: activities are cancelled
    place.start_worker()
    await until(lambda: first.poll() is not None)
    stub.hold.set()
    ref = await handle.result()
    assert (ref.attempt, ref.status, ref.turns) == (0, "completed", 4)
    assert not b.attempt(group, 0)["counts_as_failure"]


async def test_rollouts_of_the_real_engine_are_what_its_weights_say(
    walk: Callable[..., Any], place: Place, tmp_path: Path
) -> None:
    b = walk("stateless", groups={"size": 4}, budget={"segment_tokens": 4}, trainer={"width": 96})
    weights = Weights.random(GPT2, 1)
    b.serve(1, sha256=bytes.fromhex(weights.sha256))
    group = b.group()
    with running_engine(tmp_path) as engine:
        client = EngineClient()
        try:
            await engine.serve(client, policy_name(b.run, 1), weights)
        finally:
            await client.aclose()
        engines(b, engine.url, version=1)
        place.start_worker()
        handles = [await place.begin(b.key(group, sample)) for sample in range(4)]
        refs = [await handle.result() for handle in handles]
    assert all(ref.member for ref in refs)
    for sample in range(4):
        for s in b.ledger.call(segments.read, b.run, group, sample, 0):
            ids, sampled = s.prompt_ids.tolist(), tuple(s.sampled_ids.tolist())
            assert s.logprobs == pytest.approx(weights.of(ids, sampled).tolist(), abs=1e-4)
    assert b.close(group).state == "complete"


async def test_a_rollout_that_is_taken_up_is_the_one_that_it_would_have_been(
    walk: Callable[..., Any], place: Place, tmp_path: Path
) -> None:
    """Runs of one seed on the real engine; a worker that dies has sampled tokens in its hands."""
    weights, rollouts = Weights.random(GPT2, 1), []
    with running_engine(tmp_path) as engine:
        for recovery, dies in (("stateless", False), ("stateless", True), ("snapshot", True)):
            b = walk(recovery, budget={"segment_tokens": 4}, trainer={"width": 96})
            b.serve(1, sha256=bytes.fromhex(weights.sha256))
            group, world = b.group(), tmp_path / f"world-{b.run}"
            client = EngineClient()
            try:
                await engine.serve(client, policy_name(b.run, 1), weights)
            finally:
                await client.aclose()
            engines(b, engine.url, version=1)
            handle = await place.begin(b.key(group, 0))
            if dies:
                first = place.start_worker(WORLD=str(world), FAILPOINT="segment_sampled:3")
                assert await asyncio.to_thread(first.wait, 60) == 137
            worker = place.start_worker(WORLD=str(world))
            ref = await handle.result()
            worker.kill()
            worker.wait()
            row = b.attempt(group, 0)
            assert (row["fence"], row["counts_as_failure"]) == (1 + dies, False)
            rollouts.append((ref, b.ledger.call(segments.read, b.run, group, 0, 0), world))
    whole, told, did = rollouts[0]
    assert len(told) > 4
    for ref, found, did_again in rollouts[1:]:
        assert ref == whole
        assert did_again.read_text() == did.read_text()  # nothing was done twice
        assert len(found) == len(told)
        for one, other in zip(found, told, strict=True):
            assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
            assert one.sampled_ids.tolist() == other.sampled_ids.tolist()
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
