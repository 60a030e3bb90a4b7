import os
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from psycopg import conninfo, sql

from activities.inference import EngineClient
from domain.services import vllm_python
from tests.integration.rollouts.conftest import ledger, make
from tests.vllm import sights
from tests.vllm.lab import Lab, running_front

__all__ = ["ledger", "make"]  # fixtures: runs in a ledger, here beside real servers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is of the tier `vllm`, and starts take their time."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1600))
            if vllm_python(os.environ) is None:
                item.add_marker(
                    pytest.mark.skip("ROLLBOOK_VLLM_PYTHON names no interpreter: `make test-vllm`")
                )


@pytest.fixture(scope="session")
def ledger_url(postgres_url: str, ledger_template: str) -> str:
    """One database for all tests here: each makes runs of its own."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE vllm TEMPLATE {}").format(sql.Identifier(ledger_template))
        )
    return conninfo.make_conninfo(postgres_url, dbname="vllm")


@pytest_asyncio.fixture
async def client() -> AsyncIterator[EngineClient]:
    opened = EngineClient()
    yield opened
    await opened.aclose()


@pytest_asyncio.fixture(scope="module")
async def sighted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """A front that replaces the full weights of a model that sees."""
    async with running_front(
        tmp_path_factory.mktemp("sighted"),
        describe=sights.materialise,
        images=4,
        max_context=sights.CONTEXT,
    ) as lab:
        yield lab


@pytest_asyncio.fixture(scope="module")
async def in_place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """A front that replaces full weights; four requests may wait beside the eight it decodes."""
    async with running_front(tmp_path_factory.mktemp("in-place"), max_waiting=4) as lab:
        yield lab


@pytest_asyncio.fixture(scope="module")
async def adapters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    """A front that serves up to two adapters of rank 8."""
    folder = tmp_path_factory.mktemp("adapters")
    async with running_front(folder, adapters=2, lora_rank=8) as lab:
        yield lab
