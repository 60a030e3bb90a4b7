"""What a RolloutScheduler refuses before it starts or writes anything."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from domain.config import OWN_LOOP
from domain.environments import Env, PromptSource, task_ids
from domain.errors import ConfigError
from domain.rollouts import Task
from domain.services import Services
from rollbook import EnginePublisher, RolloutScheduler, own_config, scheduler
from tests.own_loop import Scored, model_folder

Make = Callable[..., RolloutScheduler]
SOURCE = PromptSource(lambda text, task: 0.0)


class Untouched:
    """Fails the test if the constructor gets as far as services."""

    def __init__(self, services: object, state: object) -> None:
        raise AssertionError("services were asked for")


class Unjudged(Env):
    async def reset(self, task: Task) -> list[dict[str, Any]]:
        return []

    async def reward(self, rollout: object, task: Task) -> float:
        return 0.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(scheduler, "Companions", Untouched)

    def make(**settings: Any) -> RolloutScheduler:
        defaults: dict[str, Any] = {
            "objective": Scored(),
            "source": SOURCE,
            "weights": EnginePublisher(folder),
            "width": 32,
            "rows": 2,
            "run": "mine",
        }
        return RolloutScheduler(**(defaults | settings))

    return make


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ahead": 2}, r"max_lag = 1 is below ahead \+ sync_every - 1 = 2"),
        ({"max_lag": 0}, r"max_lag = 0 is below ahead \+ sync_every - 1 = 1"),
        ({"sync_every": 2}, r"max_lag = 1 is below ahead \+ sync_every - 1 = 2"),
        ({"max_lag": 4, "ahead": 3, "sync_every": 3}, r"ahead \+ sync_every - 1 = 5"),
        ({"objective": SimpleNamespace(importance=None)}, "needs trainer.importance"),
        ({"objective": SimpleNamespace(importance=(0.5, 0.9))}, "no band around 1"),
        ({"groups": 1}, "groups.size must be at least 2"),
        ({"admit": 0}, "admit"),
        ({"batch_size": 2, "admit": 3}, "admit = 3 must not exceed tasks.batch_size = 2"),
        ({"max_attempts": 0}, "max_attempts = 0"),
        ({"timeout": 0.0}, "timeout = 0"),
        ({"estimator": "best"}, "estimator = 'best'"),
        ({"truncation": "keep"}, "truncation = 'keep'"),
        ({"source": Unjudged(), "truncation": "score"}, "implement Unjudged.on_truncated"),
        ({"sampling": {"top_k": 4}}, r"support_capacity >= top_k \* width = 128"),
        ({"sampling": {"top_k": 4}, "support_capacity": 127}, r"= 128 \(it is 127\)"),
        ({"sampling": {"top_p": 0.9}, "support_capacity": 128}, "needs sampling.top_k too"),
        ({"sampling": {"topk": 4}}, "did you mean 'top_k'"),
        ({"budget": {"max_context_tokens": 33}}, "exceeds trainer.width = 32"),
        ({"width": 64}, "exceeds the 32 positions of the model"),
        ({"run": "No Good"}, "name = 'No Good'"),
        ({"source": object()}, "it must be an Env, a PromptSource"),
        ({"source": "nowhere:source"}, "no module 'nowhere'"),
        ({"weights": object()}, "is no Publisher"),
        ({"weights": SimpleNamespace(version=0, load=print)}, "pass model=FOLDER"),
        ({"model": "elsewhere"}, "names the model already"),
        ({"exact": "nearly"}, "exact = 'nearly'"),
    ],
)
def test_what_cannot_hold_together_is_refused_with_the_reason(
    make: Make, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ahead": 2, "max_lag": 2},
        {"sync_every": 2, "max_lag": 2},
        {"ahead": 3, "sync_every": 2, "max_lag": 4},
        {"ahead": 0, "max_lag": 0, "objective": SimpleNamespace(importance=None)},
        {"sampling": {"top_k": 4, "top_p": 0.9}, "support_capacity": 128},
    ],
)
def test_what_holds_together_goes_on_to_the_services(make: Make, settings: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="services were asked for"):
        make(**settings)


def test_a_publisher_of_ones_own_needs_engines_to_push_to(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    services = Services(
        database_url="postgresql://nobody@127.0.0.1:1/none",
        temporal_address="127.0.0.1:1",
        s3_endpoint="http://127.0.0.1:1",
        s3_access_key="a",
        s3_secret_key="b",
    )
    companions = SimpleNamespace(services=services, close=lambda: closed.append(True))
    monkeypatch.setattr(scheduler, "Companions", lambda *_: companions)
    with pytest.raises(ConfigError, match="ROLLBOOK_ENGINES"):
        make(weights=SimpleNamespace(version=0, load=print), model=folder)
    assert closed == [True]


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EnginePublisher\(model\) = .* has no config.json"):
        EnginePublisher(tmp_path)


def test_a_source_is_found_by_the_module_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PromptSource(lambda text, task: 0.0)
    assert own_config.locate(source).reference is None
    module = ModuleType("games.words")
    module.__file__ = str(tmp_path / "games" / "words.py")
    vars(module)["spelling"] = source
    monkeypatch.setitem(sys.modules, "games.words", module)
    located = own_config.locate(source)
    assert (located.reference, located.root) == ("games.words:spelling", tmp_path)
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    vars(main)["mine"] = lonely = PromptSource(lambda text, task: 1.0)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert own_config.locate(lonely).reference is None


def test_every_run_has_a_task_queue_of_its_own() -> None:
    names = ["a", "a.b", "a-b", "x" * 63, "x" * 62 + "y", "x" * 37, "x" * 36]
    queues = {own_config.environment_of(name) for name in names}
    assert len(queues) == len(names)
    assert all(len(queue) <= 41 for queue in queues)


def test_the_configuration_says_that_a_loop_owns_the_run(folder: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "groups": {"size": 4},
        "schedule": {"max_lag": 1},
        "trainer": {"width": 32, "rows": 2},
        "sampling": {},
        "budget": {},
        "engine": {},
    }
    config = own_config.build(
        "mine",
        own_config.locate(SOURCE),
        model=folder,
        batch_size=3,
        dtype="float32",
        seed=5,
        **settings,
    )
    assert config.tasks.dataset == OWN_LOOP
    assert (config.schedule.order, config.schedule.stale_policy) == ("dataset", "resubmit")
    assert (config.trainer.overflow, config.seed, config.tasks.batch_size) == ("cut", 5, 3)


SIGNATURE = {
    "tasks": "task_ids",
    "groups": 4,
    "oversample": 0,
    "admit": None,
    "max_lag": 1,
    "ahead": 1,
    "sync_every": 1,
    "max_attempts": 3,
    "timeout": None,
    "estimator": "group",
    "truncation": "mask",
    "support_capacity": None,
    "log": None,
    "services": None,
}


def test_the_defaults_are_those_of_the_signature() -> None:
    parameters = inspect.signature(RolloutScheduler).parameters
    found = {name: parameters[name].default for name in SIGNATURE}
    assert found.pop("tasks") is task_ids
    assert found == {name: value for name, value in SIGNATURE.items() if name != "tasks"}
    assert all(
        parameters[name].default is inspect.Parameter.empty for name in ("width", "rows", "run")
    )


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"width": 31}, "trainer.width", 31),
        ({"rows": 5}, "trainer.rows", 5),
        ({"groups": 6}, "groups.size", 6),
        ({"oversample": 2}, "groups.oversample", 2),
        ({"admit": 2, "batch_size": 3}, "groups.admit", 2),
        ({"max_lag": 3}, "schedule.max_lag", 3),
        ({"ahead": 2, "max_lag": 2}, "schedule.ahead", 2),
        ({"sync_every": 2, "max_lag": 2}, "schedule.sync_every", 2),
        ({"max_attempts": 7}, "groups.max_attempts", 7),
        ({"timeout": 9.5}, "groups.timeout", 9.5),
        ({"estimator": "rloo"}, "trainer.estimator", "rloo"),
        ({"truncation": "zero"}, "trainer.truncation", "zero"),
        ({"support_capacity": 99}, "trainer.support_capacity", 99),
        ({"on_reopen": "cancel"}, "schedule.on_reopen", "cancel"),
        ({"exact": "order"}, "trainer.exact", "order"),
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature", 0.7),
        ({"budget": {"max_turns": 2}}, "budget.max_turns", 2),
        ({"engine": {"max_batch": 3}}, "engine.max_batch", 3),
        ({"seed": 11}, "seed", 11),
        ({"run": "other"}, "name", "other"),
        ({"objective": SimpleNamespace(importance=(0.5, 2.0))}, "trainer.importance", [0.5, 2.0]),
    ],
)
def test_each_parameter_reaches_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key: str, value: Any
) -> None:
    companions = SimpleNamespace(services=SimpleNamespace(engines=()), close=lambda: None)
    monkeypatch.setattr(scheduler, "Companions", lambda *_: companions)
    monkeypatch.setattr("rollbook.publishing.check_engines", lambda *_: None)
    monkeypatch.setattr("rollbook.own_run.recorded", lambda *_: None)
    one = make(**settings)
    found: Any = one._configure(settings.get("batch_size", 1)).model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    assert found == value
