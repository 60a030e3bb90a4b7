"""The worker processes as they are started: what they import, what they weigh, how they leave."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from domain.messages import LEDGER_QUEUE, WORKFLOW_QUEUE
from domain.services import Services
from storage import database

ROOT = Path(__file__).parents[2]

QUEUES = {
    "workflows": (WORKFLOW_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
    "rollouts": ("rollout-workers-test", TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
    "ledger": (LEDGER_QUEUE, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
}

WORKER = """
import asyncio, os, signal, sys
import psutil
from domain.services import Services
from rollbook.workers import run_worker

def report():
    heavy = {"torch", "transformers", "vllm", "transformers.modeling_utils"} & set(sys.modules)
    print(sorted(heavy), psutil.Process().memory_full_info().pss // 2**20, flush=True)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report)
    services = Services.from_environment(os.environ)
    await run_worker(sys.argv[1], services, environments=("workers-test",))
    print("drained", flush=True)

asyncio.run(main())
"""


@contextmanager
def worker(kind: str, services: Services) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER, kind],
        cwd=ROOT,
        env={**os.environ, **services.environment(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def upgraded(services: Services) -> Services:
    database.upgrade(services.database_url)
    return services


async def polled_by(services: Services, kind: str, pid: int) -> None:
    """Wait until the process polls its task queue."""
    client = await Client.connect(services.temporal_address, namespace=services.temporal_namespace)
    queue, of_type = QUEUES[kind]
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=of_type
    )
    async with asyncio.timeout(60):
        while True:
            try:
                described = await client.workflow_service.describe_task_queue(request)
            except RPCError:
                continue
            if any(poller.identity.startswith(f"{pid}@") for poller in described.pollers):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["workflows", "rollouts", "ledger"])
async def test_a_worker_is_light_knows_no_torch_and_drains_on_sigterm(
    kind: str, upgraded: Services
) -> None:
    with worker(kind, upgraded) as process:
        await polled_by(upgraded, kind, process.pid)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        heavy, _, memory = (await asyncio.to_thread(process.stdout.readline)).rpartition(" ")
        process.terminate()
        out, err = await asyncio.to_thread(process.communicate, timeout=30)
        assert (process.returncode, out) == (0, "drained\n"), err
    assert heavy == "[]"
    assert int(memory) <= 150  # MiB, of its share: others map the same libraries


async def test_a_worker_waits_for_services_that_are_away(upgraded: Services) -> None:
    away = upgraded.model_copy(update={"temporal_address": "127.0.0.1:1"})
    with worker("ledger", away) as process:
        assert process.stderr is not None
        line = await asyncio.to_thread(process.stderr.readline)
        assert "Temporal at 127.0.0.1:1" in line
        process.terminate()
        out, _ = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == 0
        assert out == "drained\n"
