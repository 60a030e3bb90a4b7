"""One engine and one client per test."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from activities.inference import EngineClient
from tests.integration.engine.lab import Running, running_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Running]:
    with running_engine(tmp_path) as started:
        yield started


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    opened = EngineClient()
    yield opened
    await opened.aclose()
