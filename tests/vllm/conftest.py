import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from domain.services import vllm_python
from tests.vllm.lab import Lab, running_front

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
