"""One house for all plays of a session."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from temporalio.client import Client

from activities import namespace
from activities.payloads import MESSAGES
from tests.group_theatre import (
    Opened,
    Theatre,
)


@pytest.fixture(scope="session")
async def client(temporal_address: str) -> AsyncIterator[Client]:
    client = await Client.connect(temporal_address, namespace="rollbook", data_converter=MESSAGES)
    await namespace.ensure(client)
    yield client
    await asyncio.sleep(0.5)  # temporalio 1.35 may crash an interpreter that exits sooner


@pytest.fixture
def house(client: Client) -> Callable[[Theatre], Opened]:
    return lambda theatre: Opened(client, theatre)
