"""Services around a trainer, and the history of an undisturbed run."""

import secrets
from pathlib import Path

import pytest

from domain.services import Services
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.playing import Fleet, configuration
from tests.trained import (
    History,
    create,
    history,
    train,
)


@pytest.fixture
def around(ledger_url: str, ledger: Ledger, s3_services: Services) -> Services:
    """A fresh ledger and the session's object store."""
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(update={"database_url": ledger_url})


@pytest.fixture
def name() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def remembered() -> dict[str, History]:
    return {}


@pytest.fixture
def straight(
    around: Services, ledger: Ledger, tmp_path: Path, name: str, remembered: dict[str, History]
) -> History:
    """The history of an uninterrupted run of the default configuration."""
    if "default" not in remembered:
        run = create(ledger, configuration(f"{name}-s", tmp_path))
        with Fleet(around, tmp_path / "s") as fleet:
            assert train(run, around, fleet) == "finished"
        remembered["default"] = history(ledger, run)
    return remembered["default"]
