"""A ledger for ranks, and what a run of two makes when nothing disturbs it."""

from pathlib import Path

import pytest

from domain.services import Services
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.launched_ranks import History, create, history, train
from tests.playing import Fleet


@pytest.fixture
def around(ledger_url: str, ledger: Ledger, s3_services: Services) -> Services:
    """A fresh ledger and the session's object store."""
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(update={"database_url": ledger_url})


@pytest.fixture(scope="session")
def remembered() -> dict[str, History]:
    return {}


@pytest.fixture(params=["ddp", "fsdp"])
def parallel(request: pytest.FixtureRequest) -> str:
    """How the ranks share the work of a step."""
    return str(request.param)


@pytest.fixture
def straight(
    around: Services,
    ledger: Ledger,
    tmp_path: Path,
    remembered: dict[str, History],
    parallel: str,
) -> History:
    """The history of an undisturbed run."""
    if parallel not in remembered:
        name = create(ledger, tmp_path / "straight", trainer={"parallel": parallel})
        with Fleet(around, tmp_path / "straight-engine"):
            train(name, around)
        remembered[parallel] = history(ledger, name)
    return remembered[parallel]
