"""A rollout worker process for tests that kill it: `python rollout_worker.py QUEUE CACHE`."""

import asyncio
import os
import sys
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import Worker

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from activities.attempt import PATIENCE_S, Attempts  # noqa: E402
from activities.inference import EngineClient  # noqa: E402
from activities.payloads import MESSAGES  # noqa: E402
from activities.routing import Router  # noqa: E402
from activities.sampler import Sampler  # noqa: E402
from activities.setups import Setups  # noqa: E402
from domain.services import Services  # noqa: E402
from storage.database import Ledger  # noqa: E402
from storage.objects import ObjectStore  # noqa: E402


async def main(queue: str, cache: Path) -> None:
    services = Services.from_environment(os.environ)
    client = await Client.connect(
        services.temporal_address,
        namespace=services.temporal_namespace,
        data_converter=MESSAGES,
    )
    ledger = Ledger.open(services.database_url, patience_s=PATIENCE_S)
    sampler = Sampler(ledger, EngineClient(), Router(ledger))
    attempts = Attempts(
        sampler, Setups(ledger, ObjectStore(services), cache), worker=f"test:{os.getpid()}"
    )
    beats = timedelta(seconds=0.5)
    worker = Worker(
        client,
        task_queue=queue,
        activities=[attempts.run_attempt],
        max_concurrent_activities=256,
        max_heartbeat_throttle_interval=beats,
        default_heartbeat_throttle_interval=beats,
    )
    await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
