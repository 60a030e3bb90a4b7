"""What durable groups cost: groups of 8 with rollouts that cost nothing, against bare Temporal.

    python -m bench.orchestration [--groups 60] [--rounds 3]

`bare` is the least Temporal can do for 8 rollouts: a workflow that awaits 8 empty activities. `ours`
is the whole way of a group: hand-over, outbox, relay, GroupWorkflow, 8 attempts with their ledger
transactions, admission to the queue. Both run on the same server, in turn, with the same number of
worker processes, all of them unsandboxed. The aim is a ratio of at least 0.6.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import psutil
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from domain.config import RunConfig, TinyModel
from domain.environments import Outcome, Recorder
from domain.rollouts import Status, Task
from domain.services import Services
from rollbook import workers
from rollbook.stack.stack import Stack
from storage import checkpoints, manifests, runs, tasks, versions
from storage.database import Ledger, Tx, upgrade
from storage.objects import ObjectStore
from trainer.folders import description_files, files_digest, materialise_tiny

SIZE = 8
CONCURRENT = 32
ENVIRONMENT = "bench"
OURS: tuple[workers.Kind, ...] = ("workflows", "rollouts", "ledger")


@activity.defn
async def nothing(sample: int) -> int:
    """The least an activity can do."""
    return sample


@workflow.defn(sandboxed=False)
class Bare:
    """Eight of them."""

    @workflow.run
    async def run(self, size: int) -> int:
        """Their number."""
        done = await asyncio.gather(
            *(
                workflow.execute_activity(
                    nothing,
                    sample,
                    task_queue="bare-activities",
                    start_to_close_timeout=timedelta(seconds=60),
                )
                for sample in range(size)
            )
        )
        return len(done)


async def serve_bare(kind: str, services: Services) -> None:
    """A worker of the baseline, with the slots of ours."""
    client = await Client.connect(
        services.temporal_address, namespace="rollbook", data_converter=pydantic_data_converter
    )
    worker = (
        Worker(
            client,
            task_queue="bare",
            workflows=[Bare],
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_concurrent_workflow_tasks=32,
        )
        if kind == "workflows"
        else Worker(
            client,
            task_queue="bare-activities",
            activities=[nothing],
            max_concurrent_activities=256,
        )
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with worker:
        await stop.wait()
    await asyncio.sleep(0.5)


def _bare(kind: str, services: Services) -> None:
    asyncio.run(serve_bare(kind, services))


def _ours(kind: workers.Kind, services: Services, cache: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(workers.run_worker(kind, services, environments=(ENVIRONMENT,), cache=cache))


class Free:
    """A source whose rollouts cost nothing: no request, no token, a reward."""

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        """At once."""
        return Outcome(status=Status.COMPLETED, reward=1.0)


source = Free()


@dataclass(frozen=True)
class Round:
    """Groups a second, and CPU milliseconds an attempt by process."""

    rate: float
    cpu_ms: dict[str, float]


class Meter:
    """CPU time of processes, their children included (Postgres has many)."""

    def __init__(self, processes: dict[str, int]) -> None:
        self.processes = processes
        self.before = self._read()
        self.began = time.perf_counter()

    def stop(self, groups: int) -> Round:
        """The round's figures."""
        seconds = time.perf_counter() - self.began
        now = self._read()
        attempts = groups * SIZE
        return Round(
            groups / seconds,
            {name: 1e3 * (now[name] - self.before[name]) / attempts for name in self.processes},
        )

    def _read(self) -> dict[str, float]:
        return {name: _cpu_s(psutil.Process(pid)) for name, pid in self.processes.items()}


def _cpu_s(process: psutil.Process) -> float:
    own = process.cpu_times()
    total = own.user + own.system
    if process.pid == os.getpid():  # the client, parent of all the others
        return total
    total += own.children_user + own.children_system
    for child in process.children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


async def bare_round(client: Client, processes: dict[str, int], groups: int) -> Round:
    """Start and await so many bare workflows."""
    slots = asyncio.Semaphore(CONCURRENT)
    prefix = secrets.token_hex(4)

    async def one(number: int) -> None:
        async with slots:
            await client.start_workflow(
                Bare.run, SIZE, id=f"bare/{prefix}/{number}", task_queue="bare"
            )
        await client.get_workflow_handle(f"bare/{prefix}/{number}").result()

    meter = Meter(processes)
    await asyncio.gather(*(one(number) for number in range(groups)))
    return meter.stop(groups)


async def our_round(ledger: Ledger, processes: dict[str, int], groups: int, model: str) -> Round:
    """Hand over one batch of so many groups; until all stand in the queue."""
    run = f"bench-{secrets.token_hex(4)}"
    epoch = await asyncio.to_thread(create, ledger, free(run, groups), model)
    await asyncio.sleep(0.5)
    meter = Meter(processes)
    handed = await ledger.run(tasks.hand_over, run, epoch, 0)
    if handed.submitted != groups:
        raise RuntimeError(f"{handed.submitted} groups were handed over, not {groups}")

    def queued(tx: Tx) -> int:
        row = tx.execute("SELECT count(*) AS n FROM queue WHERE run_id = %s", (run,)).fetchone()
        return int(row["n"]) if row else 0

    while await ledger.run(queued) < groups:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    figures = meter.stop(groups)
    ledger.call(runs.close, run, epoch, "closed")
    return figures


def free(run: str, groups: int) -> RunConfig:
    """One batch of groups whose rollouts cost nothing."""
    return RunConfig.parse(
        {
            "name": run,
            "steps": 1,
            "tasks": {
                "source": "bench.orchestration:source",
                "dataset": "bench.orchestration:source",
                "batch_size": groups,
                "environment": ENVIRONMENT,
            },
            "groups": {"size": SIZE},
            "schedule": {"order": "dataset", "ahead": 0, "max_lag": 0},
            "model": {"tiny": {}},
            "root": str(Path(__file__).parents[1]),
        }
    )


def create(ledger: Ledger, config: RunConfig, model: str, *, engine: str = "http://none") -> int:
    """A run that serves version 0 on an engine and has one registered batch; its epoch."""
    run = config.name
    digest = sha256(run.encode()).digest()
    manifest = f"weights/{run}/0/{digest.hex()}/manifest.json"
    ledger.call(runs.create, config, world={"model_manifest": model})
    epoch = ledger.call(runs.take_over, run, "bench", lease_s=3600)
    ledger.call(
        checkpoints.create_first,
        run,
        epoch,
        weights_sha256=digest,
        manifest_key=manifest,
        weights_bytes=1,
        probe=None,
        prefix=f"checkpoints/{run}",
        manifest_sha256=digest,
        bytes=1,
        data_position={},
        rng={},
        world={},
    )
    ledger.call(versions.record_weights, run, epoch, 0, manifest_key=manifest, bytes=1, probe=None)
    ledger.call(versions.publish, run, epoch, 0)
    ledger.call(versions.see_engine, run, engine, 1, 8, 3600.0)
    ledger.call(versions.acknowledge, run, engine, 1, 0, digest)
    ledger.call(versions.mark_served, run, 0)
    with ledger.transaction() as tx:
        tx.execute("DELETE FROM outbox WHERE run_id = %s", (run,))  # it is published already
    rows = [Task(str(number), {}) for number in range(config.tasks.batch_size)]
    ledger.call(tasks.register_batch, run, epoch, 0, 0, rows, {"batch": 1})
    return epoch


@contextmanager
def processes(
    targets: dict[str, tuple[Callable[..., None], tuple[object, ...]]],
) -> Iterator[dict[str, int]]:
    """Spawned processes by name, ended on leaving."""
    context = multiprocessing.get_context("spawn")
    running = {
        name: context.Process(target=target, args=args, name=name)
        for name, (target, args) in targets.items()
    }
    for process in running.values():
        process.start()
    try:
        yield {name: int(process.pid or 0) for name, process in running.items()}
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(20)


async def measure(
    services: Services, servers: dict[str, int], groups: int, rounds: int, cache: Path
) -> None:
    """Alternate the two, print each round and the medians."""
    client = await workers.connect(services)
    ledger = Ledger.open(services.database_url, pool=2, application="bench")
    model = await asyncio.to_thread(store_model, services, cache / "tiny")
    ours, bare = [], []
    with processes(
        {
            **{kind: (_ours, (kind, services, cache)) for kind in OURS},
            **{f"bare {kind}": (_bare, (kind, services)) for kind in ("workflows", "activities")},
        }
    ) as started:
        everything = {**servers, **started, "client": os.getpid()}
        of_bare = {name: pid for name, pid in everything.items() if name not in OURS}
        of_ours = {name: pid for name, pid in everything.items() if not name.startswith("bare")}
        await bare_round(client, of_bare, SIZE)  # warm both
        await our_round(ledger, of_ours, SIZE, model)
        for _ in range(rounds):
            bare.append(await bare_round(client, of_bare, groups))
            ours.append(await our_round(ledger, of_ours, groups, model))
            print(f"bare {bare[-1].rate:6.2f} groups/s    ours {ours[-1].rate:6.2f} groups/s")
        memory = {n: psutil.Process(pid).memory_info().rss / 2**20 for n, pid in started.items()}
    ledger.close()
    report(bare, ours)
    print("memory " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in memory.items()))


def store_model(services: Services, folder: Path) -> str:
    """Put the tokenizer that every run has into the object store; the manifest's key."""
    store = ObjectStore(services)
    store.prepare()
    materialise_tiny(TinyModel(), folder)
    files = description_files(folder, "float32")
    digest = files_digest(files)
    stored = manifests.upload(store, f"models/{digest}", files, kind="model", sha256=digest)
    return stored.manifest_key


def report(bare: list[Round], ours: list[Round]) -> None:
    """Medians."""
    ratios = [o.rate / b.rate for o, b in zip(ours, bare, strict=True)]
    print(f"\n{'':24}{'bare':>10}{'ours':>10}")
    print(f"{'groups/s':24}{_median(bare):10.2f}{_median(ours):10.2f}")
    print(f"{'ratio':24}{'':10}{statistics.median(ratios):10.2f}")
    print("CPU ms per attempt")
    names = dict.fromkeys([*bare[0].cpu_ms, *ours[0].cpu_ms])
    for name in names:
        cells = [
            f"{statistics.median(r.cpu_ms[name] for r in rounds):10.2f}"
            if name in rounds[0].cpu_ms
            else f"{'-':>10}"
            for rounds in (bare, ours)
        ]
        print(f"  {name:22}{cells[0]}{cells[1]}")
    total = [statistics.median(sum(r.cpu_ms.values()) for r in rounds) for rounds in (bare, ours)]
    print(f"  {'all':22}{total[0]:10.2f}{total[1]:10.2f}")


def _median(rounds: list[Round]) -> float:
    return statistics.median(each.rate for each in rounds)


def main() -> None:
    """Start Postgres and Temporal as `rollbook up` does, measure, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=60, help="groups a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    state = Path(tempfile.mkdtemp(prefix="rollbook-bench-"))
    state.chmod(0o711)
    try:
        with Stack.up(state, environ={}) as stack:
            upgrade(stack.services.database_url)
            reports = stack.supervisor.reports() if stack.supervisor else []
            servers = {report.name: report.pid for report in reports if report.pid}
            asyncio.run(
                measure(
                    stack.services, servers, arguments.groups, arguments.rounds, state / "cache"
                )
            )
    finally:
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
