"""Every parameter of `RolloutEngine` and `AsyncTrainer` reaches the configuration that runs."""

from dataclasses import fields
from inspect import Parameter, isasyncgenfunction, signature
from typing import Any

import pytest
import torch

from domain.config import RunConfig
from domain.environments import PromptSource
from domain.errors import ConfigError
from domain.rollouts import Task
from rollbook import (
    AdamW,
    AsyncTrainer,
    Batchwise,
    Budget,
    GroupCentered,
    GroupCompletion,
    KVCache,
    LeaveOneOut,
    Loss,
    RolloutEngine,
    Step,
    TinyModel,
)
from rollbook.connect import STATE

TINY = TinyModel(alphabet="ab", max_positions=64)


def reward(text: str, task: Task) -> float:
    return float(text == "a")


def engine(**settings: Any) -> RolloutEngine:
    return RolloutEngine(settings.pop("model", TINY), env=PromptSource(reward), **settings)


def configured(engine_settings: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    given: dict[str, Any] = {
        "engine": engine(**(engine_settings or {})),
        "optimizer": AdamW(lr=1e-3),
        "completion": GroupCompletion(),
        "groups_per_step": 2,
        "width": 64,
        "run": "r",
    }
    return AsyncTrainer(**(given | settings))._configure(7)


def test_the_defaults_are_those_of_the_signature() -> None:
    c = configured()
    assert (c.steps, c.tasks.batch_size, c.groups.size) == (7, 2, 16)
    s = c.schedule
    assert (s.order, s.stale_policy, s.max_lag, s.ahead, s.sync_every) == (
        "deadline",
        "wait",
        2,
        1,
        1,
    )
    assert (c.sampling.policy, c.groups.timeout, c.groups.environment_timeout) == (
        "trajectory",
        1800.0,
        None,
    )
    assert (c.trainer.estimator, c.trainer.importance, c.checkpoint.every) == ("group", 5.0, 1)
    assert c.budget.max_context_tokens == 64  # the default budget follows the width


MUST = Parameter.empty
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 0}
TIMES: dict[str, Any] = {"sample_timeout": 1800.0, "environment_timeout": None}
PINNED: dict[str, Any] = {"sampling_policy": "trajectory", "kv_cache": KVCache()}
BOUND: dict[str, Any] = {
    "max_staleness": 2,
    "stale_policy": "wait",
    "allow_trajectory_loss": False,
    "allow_unbounded_staleness": False,
}
PACE: dict[str, Any] = {"order": "deadline", "ahead": 1, "sync_every": 1, "minibatches": 1}
ROWS: dict[str, Any] = {"width": None, "rows": 8, "checkpoint_every": 1}
KEPT: dict[str, Any] = {"run": MUST, "services": None, "state": STATE, "force": False}
PROMISED: dict[Any, dict[str, Any]] = {
    RolloutEngine: {"model": MUST, "env": MUST, "budget": Budget(), **PINNED, **SAMPLED, **TIMES},
    AsyncTrainer: {
        **dict.fromkeys(("engine", "optimizer", "completion", "groups_per_step"), MUST),
        "group_size": 16,
        "advantage": GroupCentered(),
        "loss": Loss(),
        **BOUND,
        "truncation": "mask",
        "truncation_by_cause": {},
        **PACE,
        **ROWS,
        **KEPT,
    },
    KVCache: {"max_staleness": 0, "on_limit": "hold", "allow_reprefill": False},
    GroupCompletion: {
        "mode": "wait",
        "min_members": 2,
        "max_straggler_tokens": None,
        "on_stragglers": "truncate",
    },
    Budget: {
        "max_turns": 8,
        "max_generated_tokens": 32_768,
        "max_context_tokens": 131_072,
        "segment_tokens": 4_096,
        "final_answer_reserve": 0,
        "tool_output_tokens": 4_096,
        "max_turn_tokens": None,
        "max_images": None,
    },
    GroupCentered: {"standardize": True},
    LeaveOneOut: {},
    Batchwise: {"standardize": False},
}


@pytest.mark.parametrize("kind", PROMISED, ids=lambda kind: kind.__name__)
def test_every_parameter_has_the_promised_name_and_default(kind: Any) -> None:
    found = signature(kind).parameters
    assert {name: p.default for name, p in found.items()} == PROMISED[kind]
    by_place = [name for name, p in found.items() if p.kind is not Parameter.KEYWORD_ONLY]
    assert by_place == (["model"] if kind is RolloutEngine else [])


def test_a_run_is_an_iterator_of_steps() -> None:
    assert [*signature(AsyncTrainer.run).parameters] == ["self", "dataset", "steps"]
    assert isasyncgenfunction(AsyncTrainer.run)
    assert [field.name for field in fields(Step)] == ["n", "model_step", "metrics", "trajectories"]


SEGMENT = {"sampling_policy": "segment", "kv_cache": KVCache(max_staleness=1)}
REFILL = KVCache(max_staleness=1, on_limit="refill", allow_reprefill=True)
MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
QUORUM = GroupCompletion(mode="deadline", min_members=3, max_straggler_tokens=5)


LOSS: dict[str, Any] = {
    "kind": "gspo",
    "aggregation": "rollout-mean",
    "sequence_mask": (0.5, 2.0),
    "epsilon_low": 0.1,
    "epsilon_high": 0.3,
    "dual_clip": None,
    "kl": "k1",
    "entropy_coefficient": 0.1,
}
ADAMW: dict[str, Any] = {
    "lr": 0.5,
    "warmup_steps": 2,
    "schedule": "linear",
    "betas": (0.8, 0.9),
    "eps": 1e-5,
    "weight_decay": 0.2,
    "grad_clip": None,
}
Case = tuple[dict[str, Any], dict[str, Any], str, object]
CASES: list[Case] = [
    ({"temperature": 0.7}, {}, "sampling.temperature", 0.7),
    ({"top_k": 2, "top_p": 0.9}, {}, "sampling.top_p", 0.9),
    ({"top_k": 2, "min_p": 0.1}, {}, "sampling.min_p", 0.1),
    ({"top_k": 2}, {}, "sampling.top_k", 2),
    ({"top_k": 2}, {}, "trainer.support_capacity", 128),
    ({"seed": 5}, {}, "seed", 5),
    ({"sample_timeout": 9.0}, {}, "groups.timeout", 9.0),
    ({"environment_timeout": 3.0}, {}, "groups.environment_timeout", 3.0),
    (SEGMENT, {}, "sampling.policy", "segment"),
    ({**SEGMENT, "kv_cache": REFILL}, {}, "sampling.kv_cache.on_limit", "refill"),
    ({"budget": Budget(max_turns=3)}, {}, "budget.max_turns", 3),
    ({"budget": Budget(max_generated_tokens=9)}, {}, "budget.max_generated_tokens", 9),
    ({"budget": Budget(max_context_tokens=32)}, {}, "budget.max_context_tokens", 32),
    ({"budget": Budget(segment_tokens=8)}, {}, "budget.segment_tokens", 8),
    ({"budget": Budget(final_answer_reserve=8)}, {}, "budget.final_answer_reserve", 8),
    ({"budget": Budget(tool_output_tokens=8)}, {}, "budget.tool_output_tokens", 8),
    ({"budget": Budget(max_turn_tokens=8)}, {}, "budget.max_turn_tokens", 8),
    ({"budget": Budget(max_images=1)}, {}, "budget.max_images", 1),
    ({}, {"advantage": GroupCentered(standardize=False)}, "trainer.estimator", "mean"),
    ({}, {"advantage": LeaveOneOut()}, "trainer.estimator", "rloo"),
    ({}, {"advantage": Batchwise(standardize=True)}, "trainer.estimator", "batch"),
    ({}, {"advantage": Batchwise(standardize=True)}, "trainer.standardize", True),
    ({}, {"loss": "cispo"}, "trainer.loss", "cispo"),
    ({}, {"loss": Loss(importance=(0.5, 2.0))}, "trainer.importance", (0.5, 2.0)),
    ({}, {"loss": Loss(kl_coefficient=0.1)}, "trainer.kl_coefficient", 0.1),
    ({}, {"max_staleness": 3}, "schedule.max_lag", 3),
    ({}, {"max_staleness": 5}, "engine.max_resident", 7),
    ({}, MASK, "schedule.stale_policy", "mask_span"),
    ({}, {**MASK, "order": "admission"}, "schedule.order", "admission"),
    ({}, {"ahead": 2}, "schedule.ahead", 2),
    ({}, {"sync_every": 2}, "schedule.sync_every", 2),
    ({}, {"minibatches": 2}, "trainer.minibatches", 2),
    ({}, {"rows": 3}, "trainer.rows", 3),
    ({}, {"checkpoint_every": 4}, "checkpoint.every", 4),
    ({}, {"truncation": "zero"}, "trainer.truncation", "zero"),
    ({}, {"group_size": 3}, "groups.size", 3),
    (
        {},
        {"truncation_by_cause": {"tokens": "zero"}},
        "trainer.truncation_by_cause",
        {"tokens": "zero"},
    ),
    (
        {},
        {
            **MASK,
            "completion": GroupCompletion(
                mode="deadline", max_straggler_tokens=5, on_stragglers="discard"
            ),
        },
        "groups.completion.on_stragglers",
        "discard",
    ),
    ({}, {"optimizer": 0.5}, "trainer.lr", 0.5),
    (
        {},
        {"completion": QUORUM, "allow_trajectory_loss": True},
        "groups.completion.mode",
        "deadline",
    ),
    ({}, {"completion": QUORUM, "allow_trajectory_loss": True}, "groups.completion.min_members", 3),
    (
        {},
        {"completion": QUORUM, "allow_trajectory_loss": True},
        "groups.completion.max_straggler_tokens",
        5,
    ),
    ({**SEGMENT, "kv_cache": REFILL}, {}, "sampling.kv_cache.max_staleness", 1),
    ({**SEGMENT, "kv_cache": REFILL}, {}, "sampling.kv_cache.allow_reprefill", True),
    (
        {},
        {"stale_policy": "keep", "allow_unbounded_staleness": True},
        "schedule.stale_policy",
        "keep",
    ),
    ({}, {**MASK}, "schedule.allow_trajectory_loss", True),
    ({}, {"groups_per_step": 3}, "tasks.batch_size", 3),
    ({}, {"width": 128}, "trainer.width", 128),
    *(
        (
            {},
            {"loss": Loss(**{name: value})},
            "trainer.loss" if name == "kind" else f"trainer.{name}",
            value,
        )
        for name, value in LOSS.items()
    ),
    *(
        ({}, {"optimizer": AdamW(**{name: value})}, f"trainer.{name}", value)
        for name, value in ADAMW.items()
    ),
]


@pytest.mark.parametrize(("of_engine", "of_trainer", "path", "value"), CASES)
def test_each_parameter_reaches_the_run(
    of_engine: dict[str, Any], of_trainer: dict[str, Any], path: str, value: object
) -> None:
    found, default = configured(of_engine, **of_trainer), configured()
    assert of(found, path) == value
    assert of(default, path) != value


def of(config: RunConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_no_parameter_is_left_out() -> None:
    """Where a run is kept and what it plays is shown by running it (`tests/integration`)."""
    given = {name for case in CASES for table in case[:2] for name in table}
    settings = [value for case in CASES for table in case[:2] for value in table.values()]
    for kind in (RolloutEngine, AsyncTrainer):
        asked = set(signature(kind).parameters) - {"model", "env", "engine"}
        assert asked - given == (set() if kind is RolloutEngine else {*PLACE}), kind
    for settings_of in (KVCache, GroupCompletion, Budget, GroupCentered, Batchwise, Loss, AdamW):
        changed = {
            field.name
            for value in settings
            if isinstance(value, settings_of)
            for field in fields(value)
            if getattr(value, field.name) != getattr(settings_of(), field.name)
        }
        assert changed == {field.name for field in fields(settings_of)}, settings_of


PLACE = ("run", "services", "state", "force")


@pytest.mark.parametrize(
    ("of_engine", "of_trainer", "message"),
    [
        ({}, {"stale_policy": "keep"}, "allow_unbounded_staleness = true"),
        ({}, {"stale_policy": "mask_span"}, "allow_trajectory_loss = true"),
        ({}, {"order": "admission"}, "can hold for ever"),
        ({}, {"max_staleness": 0}, "max_lag = 0 is below"),
        ({"sampling_policy": "segment"}, {}, "could never change its version"),
        ({"kv_cache": KVCache(max_staleness=1)}, {}, "only the default kv_cache"),
        (
            {"sampling_policy": "segment", "kv_cache": KVCache(on_limit="refill")},
            {},
            "allow_reprefill = true",
        ),
        ({}, {"completion": GroupCompletion(mode="deadline")}, "needs max_straggler_tokens"),
        (
            {},
            {
                **MASK,
                "completion": GroupCompletion(
                    mode="deadline", max_straggler_tokens=5, on_stragglers="carry_over"
                ),
            },
            'estimator "batch"',
        ),
        ({"budget": Budget(max_context_tokens=65)}, {}, "exceeds trainer.width"),
        ({"top_p": 0.9}, {}, "needs sampling.top_k too"),
        ({}, {"loss": Loss(importance=None)}, "needs trainer.importance"),
    ],
)
def test_what_cannot_hold_together_is_refused_before_anything_starts(
    of_engine: dict[str, Any], of_trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(of_engine, **of_trainer)


def test_an_optimizer_of_torch_gives_its_hyperparameters() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    adam = torch.optim.AdamW(weights, lr=0.3, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
    t = configured(optimizer=adam).trainer
    assert (t.lr, t.betas, t.eps, t.weight_decay) == (0.3, (0.8, 0.9), 1e-5, 0.2)
    with pytest.raises(TypeError, match="only plain AdamW"):
        configured(optimizer=torch.optim.SGD(weights, lr=0.3))
    with pytest.raises(TypeError, match="optimizer is a str"):
        configured(optimizer="adam")


def test_a_model_object_is_asked_for_its_folder() -> None:
    with pytest.raises(ConfigError, match="save_pretrained"):
        engine(model=torch.nn.Linear(1, 1))


def test_what_is_played_may_be_named() -> None:
    located = RolloutEngine(TINY, env="tests.played:Adder").located
    assert located.reference == "tests.played:Adder"
    assert type(located.source).__name__ == "Adder"
    with pytest.raises(ConfigError, match="Subtracter"):
        RolloutEngine(TINY, env="tests.played:Subtracter")
