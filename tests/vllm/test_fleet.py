"""Two real vLLM servers behind one ledger: who samples what, and what a death costs.

The ledger, the fleet's keeper, the router and the recorders are the ones of workers; rollouts keep
their version (an adapter each). The tests go on from each other: one server of the two is killed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import pytest_asyncio
import torch
from psycopg import conninfo, sql

from activities.fleet import Fleet
from activities.inference import EngineClient
from activities.routing import FRESH_S, Router
from activities.sampler import Sampler
from activities.session import SessionRecorder
from domain.config import RunConfig
from domain.errors import EngineUnavailable
from domain.ids import policy_name
from domain.rollouts import Segment
from storage import runs, segments, versions
from storage.database import Ledger
from tests.integration.engine.lab import Weights, reach, sampling
from tests.integration.rollouts.conftest import Bench
from tests.ledger_fixtures import check_invariants
from tests.vllm.lab import Lab, Stored, probe_of, running_front
from tests.vllm.test_adapters import BASE, EXACT, A, stored

PROMPT = [5, 6, 7, 8]
WAITING = 4
"""Requests that wait at a front beyond the eight that it decodes together."""


@dataclass
class Two:
    """Two fronts and the run that they sample."""

    labs: Sequence[Lab]
    bench: Bench
    sampler: Sampler
    client: EngineClient
    fleet: Fleet
    tended: Sequence[str] = ()
    """Engines that the fleet's keeper looks after, as the steward's does."""

    @property
    def urls(self) -> list[str]:
        return [lab.url for lab in self.labs]

    def publish(self, version: int) -> None:
        """Store an adapter as this version, and say that it is served."""
        name, found = policy_name(self.bench.run, version), stored(A[version])
        for lab in self.labs:
            lab.source.stored[name] = found
        self.bench.sql(
            """INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, state,
            trainer_epoch, served_at) VALUES (%s, %s, %s, %s, 'served', 1, now())""",
            self.bench.run,
            version,
            bytes.fromhex(found.sha256),
            name,
        )
        self.bench.sql("UPDATE runs SET version = %s, next_step = %s", version, version)

    async def keep(self) -> None:
        """Tend the fleet until cancelled."""
        try:
            while True:
                self.fleet.urls = self.tended
                await self.fleet.tend()
                await asyncio.sleep(0.3)
        finally:
            await self.fleet.stop()

    async def leave_all_but(self, url: str) -> None:
        """Have the others no longer looked after, and nothing under way for them."""
        self.tended = [url]
        await asyncio.sleep(1)
        await asyncio.gather(*self.fleet._loading.values(), return_exceptions=True)

    async def tend(self, *urls: str, until: Callable[[], bool]) -> None:
        """Have these engines looked after, and wait until that is so."""
        self.tended = urls
        async with asyncio.timeout(600):
            while not until():  # noqa: ASYNC110 - the ledger has no event for it
                await asyncio.sleep(0.1)

    def holders(self, version: int) -> set[str]:
        found = self.bench.ledger.call(versions.routable, self.bench.run)
        return {route.engine for route in found if route.version == version}

    def recorder(self, group: int, sample: int) -> SessionRecorder:
        return SessionRecorder(
            self.sampler,
            self.bench.config,
            self.bench.key(group, sample),
            self.bench.start(group, sample),
            patience_s=120,
        )

    async def sample(
        self, recorders: Sequence[SessionRecorder], tokens: int
    ) -> list[tuple[Segment, str]]:
        """One request of each, committed; and which engine the ledger says it was."""
        await asyncio.gather(
            *(recorder.sample(PROMPT, max_tokens=tokens) for recorder in recorders)
        )
        found = []
        for recorder in recorders:
            i = recorder._attempt
            (segment,) = self.bench.ledger.call(segments.read, i.run, i.group, i.sample, i.attempt)
            found.append((segment, self.bench.attempt(i.group, i.sample)["engine_id"]))
        return found


def off(weights: Weights, segment: Segment) -> float:
    """How far the recorded log-probabilities are from the trainer's."""
    ids = tuple(int(token) for token in segment.sampled_ids)
    wanted = weights.of(PROMPT, ids)
    return float((torch.tensor(list(segment.logprobs)) - wanted).abs().max())


async def loaded_again(client: EngineClient, url: str, name: str) -> int:
    """Load an adapter on an engine whose server died, as soon as its front has given it up."""
    async with asyncio.timeout(600):
        while True:
            try:
                return await client.load(url, name, name, stored(A[1]).sha256)
            except EngineUnavailable:
                await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def shared_ledger(postgres_url: str, ledger_template: str) -> Iterator[Ledger]:
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE fleets TEMPLATE {}").format(sql.Identifier(ledger_template))
        )
    opened = Ledger.open(conninfo.make_conninfo(postgres_url, dbname="fleets"), pool=8)
    yield opened
    opened.call(check_invariants)
    opened.close()


@pytest_asyncio.fixture(scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, shared_ledger: Ledger
) -> AsyncIterator[Two]:
    table: dict[str, Any] = {
        "name": "fleet",
        "steps": 100,
        "tasks": {"source": "envs:env", "dataset": "envs:tasks", "batch_size": 2},
        "model": {"tiny": {}, "lora": {"rank": 8, "alpha": 16}},
        "groups": {"size": 40, "timeout": 300},
        "schedule": {"order": "deadline", "stale_policy": "resubmit", "max_lag": 2},
        "budget": {"segment_tokens": 450, "max_generated_tokens": 450},
    }
    config = RunConfig.parse(table)
    shared_ledger.call(runs.create, config, world={})
    bench = Bench(shared_ledger, config, "")
    async with AsyncExitStack() as stack:
        labs = [
            await stack.enter_async_context(
                running_front(
                    tmp_path_factory.mktemp(name), adapters=4, lora_rank=8, max_waiting=WAITING
                )
            )
            for name in ("one", "other")
        ]
        for lab in labs:
            lab.source.stored["base"] = Stored(
                BASE.tensors, BASE.tensors, BASE.sha256, probe_of(BASE)
            )
        client = EngineClient()
        stack.push_async_callback(client.aclose)
        sampler = Sampler(shared_ledger, client, Router(shared_ledger))
        made = Two(labs, bench, sampler, client, Fleet(shared_ledger, client, ()))
        made.publish(0)
        bench.sql(
            """INSERT INTO checkpoints(run_id, step, version, s3_prefix, manifest_sha256, bytes,
            data_position, rng, world, trainer_epoch)
            VALUES (%s, 0, 0, 'c', %s, 1, '{}', '{}', '{}', 1)""",
            bench.run,
            bytes(32),
        )
        bench.sql("UPDATE runs SET durable_step = 0, state = 'running'")
        keeping = asyncio.create_task(made.keep())
        yield made
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_requests_go_to_the_engines_that_hold_their_version(two: Two) -> None:
    one, other = two.urls
    await two.tend(one, other, until=lambda: two.holders(0) == {one, other})
    group = two.bench.group()
    pinned = [two.recorder(group, sample) for sample in range(8)]
    await two.leave_all_but(other)
    two.publish(1)
    await two.tend(other, until=lambda: two.holders(1) == {other})
    two.bench.sql("UPDATE engines SET alive_until = now() + interval '1 hour'")  # tended or not
    new = [two.recorder(group, sample) for sample in range(8, 14)]
    assert [r.version for r in (*pinned, *new)] == [0] * 8 + [1] * 6
    found = await two.sample([*pinned, *new], 40)
    assert {url for _, url in found[:8]} == {one, other}
    assert {url for _, url in found[8:]} == {other}
    for n, (segment, _) in enumerate(found):
        assert len(segment.sampled_ids) == 40
        assert off(A[int(n >= 8)], segment) < EXACT
        assert off(A[int(n < 8)], segment) > 0.1


async def test_more_requests_than_both_engines_take_are_sent_away_and_lose_nothing(
    two: Two,
) -> None:
    one, other = two.urls
    await two.tend(one, other, until=lambda: two.holders(1) == {one, other})
    group = two.bench.group()
    recorders = [two.recorder(group, sample) for sample in range(40)]
    refused: set[str] = set()

    async def watch() -> None:
        while True:
            refused.update(text for r in recorders for text in r._failures if " 429:" in text)
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    try:
        found = await two.sample(recorders, 60)
    finally:
        watching.cancel()
    assert refused  # 40 at once, and two fronts that take 12 each
    assert len(found) == 40
    assert all(len(s.sampled_ids) == 60 and off(A[1], s) < EXACT for s, _ in found)


async def test_a_server_killed_under_its_requests_costs_none_of_them(two: Two) -> None:
    one, other = two.urls
    group = two.bench.group()
    recorders = [two.recorder(group, sample) for sample in range(12)]
    pending = asyncio.create_task(two.sample(recorders, 400))
    await reach(two.client, one, lambda health: health.running >= 2)
    await reach(two.client, other, lambda health: health.running >= 2)
    process = two.labs[0].server._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    two.tended = [other]
    found = await pending
    assert {url for _, url in found} == {other}
    assert all(len(s.sampled_ids) == 400 and off(A[1], s) < EXACT for s, _ in found)
    counted = two.bench.one(
        "SELECT count(*) AS segments, sum(tokens)::int AS tokens FROM segments WHERE group_id = %s",
        group,
    )
    assert counted == {"segments": 12, "tokens": 12 * 400}
    await two.tend(other, until=lambda: two.holders(1) == {other})  # it was not seen any more


async def test_it_is_out_of_the_fleet_and_back_only_with_what_it_has_acknowledged(
    two: Two,
) -> None:
    one, other = two.urls
    run, ledger = two.bench.run, two.bench.ledger
    two.publish(2)
    await two.tend(other, until=lambda: two.holders(2) == {other})
    # The server that comes up again holds an old version that the ledger did not hear of.
    name = policy_name(run, 1)
    incarnation = await loaded_again(two.client, one, name)
    assert list((await two.client.health(one)).policies) == [name]
    ledger.call(versions.see_engine, run, one, incarnation, 4, 60.0)
    assert [two.holders(version) for version in (0, 1, 2)] == [{other}, {other}, {other}]
    newest = policy_name(run, 2)
    with pytest.raises(EngineUnavailable, match="not resident"):
        await two.client.generate(one, newest, PROMPT, sampling(), request_id="stale", salt=newest)
    group = two.bench.group()
    apart = await two.sample([two.recorder(group, sample) for sample in range(6)], 20)
    assert {url for _, url in apart} == {other}
    await two.tend(one, other, until=lambda: two.holders(2) == {one, other})
    await asyncio.sleep(FRESH_S)  # the router reuses what it knows for so long
    back = await two.sample([two.recorder(group, sample) for sample in range(6, 18)], 40)
    assert {url for _, url in back} == {one, other}
    assert all(off(A[2], segment) < EXACT for segment, _ in (*apart, *back))
