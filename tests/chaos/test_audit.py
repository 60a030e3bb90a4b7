"""`rollbook audit`: a past step is recomputed exactly, or the input that differs is named."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from domain.config import Services
from domain.errors import LedgerError
from rollbook.cli import app
from storage import checkpoints
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration
from trainer import audit, loop

from storage import runs  # isort: skip

Tamper = Callable[[Ledger, ObjectStore], None]


@pytest.fixture
def trained(
    ledger_url: str, ledger: Ledger, s3_services: Services, tmp_path: Path
) -> Iterator[Services]:
    """Services with a finished run `audited` of four steps, checkpoints 0, 2 and 4."""
    services = s3_services.model_copy(update={"database_url": ledger_url})
    ObjectStore(services).prepare()
    config = configuration("audited", tmp_path, checkpoint={"every": 2, "keep": 9})
    ledger.call(runs.create, config, world={})
    with Fleet(services, tmp_path / "engine") as fleet:
        assert loop.run("audited", services, holder="a:1", stop=fleet.broken) == "finished"
    yield services
