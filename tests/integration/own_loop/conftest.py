"""Services around a loop, and a way to make one."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from domain.services import Services
from rollbook import EnginePublisher, PromptSource, RolloutScheduler, scheduler
from storage.database import Ledger
from storage.objects import ObjectStore
from tests.own_loop import Scored, model_folder
from tests.own_loop_runs import (
    Alone,
    Loop,
    reward,
    to_tasks,
)
from tests.playing import ENGINE


@pytest.fixture
def around(ledger_url: str, ledger: Ledger, s3_services: Services) -> Services:
    ObjectStore(s3_services).prepare()
    return s3_services.model_copy(update={"database_url": ledger_url, "engines": (ENGINE,)})


@pytest.fixture
def name() -> str:
    return f"own{secrets.token_hex(4)}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def make(
    around: Services, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Loop]:
    """Schedulers of one run; all are closed in the end."""
    monkeypatch.setattr(scheduler, "Companions", Alone)
    made: list[RolloutScheduler] = []

    def make(**settings: Any) -> RolloutScheduler:
        defaults: dict[str, Any] = {
            "width": 32,
            "rows": 2,
            "tasks": to_tasks,
            "estimator": "mean",
            "run": name,
            "services": around,
            "budget": {"max_generated_tokens": 4, "max_context_tokens": 16},
            "weights": EnginePublisher(folder),
            "max_lag": 2,
        }
        one = RolloutScheduler(Scored(), PromptSource(reward), **(defaults | settings))
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
