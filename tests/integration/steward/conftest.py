"""One scene a test: a ledger, a namespace, a store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client

from activities import namespace
from activities.payloads import MESSAGES
from domain.services import Services
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.steward_scene import (
    Scene,
    staged,
)


@pytest.fixture(scope="session")
async def client(temporal_address: str) -> AsyncIterator[Client]:
    client = await Client.connect(temporal_address, namespace="rollbook", data_converter=MESSAGES)
    await namespace.ensure(client)
    yield client
    await asyncio.sleep(0.5)  # temporalio 1.35 may crash an interpreter that exits sooner


@pytest.fixture(scope="session")
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


@pytest.fixture
def scene(client: Client, ledger: Ledger, ledger_url: str, store: ObjectStore) -> Scene:
    return staged(client, ledger, ledger_url, store)
