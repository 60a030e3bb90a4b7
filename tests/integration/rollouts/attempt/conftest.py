"""A stub engine and a client of it."""

from collections.abc import AsyncIterator

import pytest

from activities.inference import EngineClient
from tests.stub_engine import StubEngine, stub_engine


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with stub_engine() as stub:
        yield stub


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    opened = EngineClient()
    yield opened
    await opened.aclose()
