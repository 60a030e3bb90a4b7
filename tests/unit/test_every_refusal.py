"""Every pair of settings that cannot hold together has its message, and a case here (V1 to V17).

Which rule of `domain.validity.conflicts` a case breaks is noted while it is refused; a rule that no
case breaks fails the last test. The ledger's own copies of V1 to V15: illegal_states/.
"""

from typing import Any

import pytest

import domain.config
from domain import validity
from domain.config import RunConfig
from domain.errors import ConfigError
from tests.unit.test_config import KEEP, MASK, MINIMAL, config, ending

DATASET = {"order": "dataset", "stale_policy": "resubmit"}
FILTERED = {"top_k": 2}

MEMBER = {"environment": "a", "source": "m:s", "dataset": "m:d"}
MIX = {"source": "", "dataset": "", "mix": [MEMBER]}

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a mix alone": ({"tasks": {"mix": [MEMBER]}}, "so move them there"),
    "a source": ({"tasks": {"source": "", "dataset": ""}}, "tasks.source is missing"),
    "a data set": ({"tasks": {"dataset": ""}}, "dataset is missing"),
    "two of one name": ({"tasks": MIX | {"mix": [MEMBER, MEMBER]}}, "one environment twice: a, a"),
    "a mix without epochs": ({"tasks": MIX | {"epochs": 1}}, "has no meaning in a mix"),
    "held out of which": ({"tasks": MIX, "evaluation": {"dataset": "m:d"}}, "say which"),
    "held out of none": (
        {"evaluation": {"dataset": "m:d", "environment": "a"}},
        "is for runs with [[tasks.mix]]",
    ),
    "an end": ({"steps": None}, "would never end; set one of them"),
    "one model": ({"model": {"tiny": {}}}, "set exactly one of model.path"),
    "V1": ({"schedule": {"max_lag": 0}}, "raise max_lag or lower ahead"),
    "V2 = M14": ({"schedule": {"stale_policy": "mask_span"}}, "allow_trajectory_loss = true"),
    "V3 = K5": ({"schedule": {"stale_policy": "keep"}}, "allow_unbounded_staleness = true"),
    "V4": ({"groups": {"completion": {"mode": "deadline"}}}, "needs max_straggler_tokens"),
    "V4 members": (
        {
            "groups": {
                "size": 2,
                "completion": {"mode": "deadline", "max_straggler_tokens": 5, "min_members": 3},
            }
        },
        "min_members = 3 exceeds groups.size = 2",
    ),
    "V5": (
        {"groups": ending("discard"), "schedule": {"allow_trajectory_loss": True}},
        "partial groups, which need stale_policy",
    ),
    "V6": ({"groups": ending("truncate")}, "loses parts of rollouts; acknowledge it"),
    "V7": ({"groups": ending("carry_over"), "schedule": MASK}, 'estimator "batch" and ahead >= 1'),
    "V8 still": ({"sampling": {"policy": "segment"}}, "could never change its version"),
    "V8 refill": (
        {"sampling": {"policy": "segment", "kv_cache": {"on_limit": "refill"}}},
        "allow_reprefill = true",
    ),
    "V8 pinned": (
        {"sampling": {"kv_cache": {"max_staleness": 1}}},
        "keeps one version per rollout",
    ),
    "V9 order": ({"schedule": {"order": "admission"}}, 'can hold for ever; use "deadline"'),
    "V9 dataset": ({"schedule": {"order": "dataset"}}, "needs ahead = 0"),
    "V9 whole": (
        {"schedule": {"order": "dataset", "ahead": 0}, "trainer": {"overflow": "cut"}},
        'needs overflow = "accumulate"',
    ),
    "V10 admit": ({"groups": {"admit": 99}}, "must not exceed tasks.batch_size"),
    "V10 size": ({"groups": {"size": 1}}, "must be at least 2 (it is 1)"),
    "V13": (
        {"schedule": {"stale_policy": "resubmit"}, "trainer": {"overflow": "cut"}},
        '"cut" needs schedule.order = "dataset"',
    ),
    "V14": ({"trainer": {"exact": "order"}, "checkpoint": {"every": 2}}, "must be 1"),
    "V15": ({"trainer": {"importance": None}}, "a cap such as 5.0 or a band"),
    "V16": (
        {"trainer": {"width": 64}, "budget": {"max_context_tokens": 65}},
        "a rollout would not fit into a row",
    ),
    "V17": ({"sampling": FILTERED}, "trainer.support_capacity >= top_k"),
    "top_k": ({"sampling": {"top_p": 0.9}}, "needs sampling.top_k too"),
    "filter order": (
        {"schedule": DATASET | {"filter_zero_variance": True}},
        "replaces groups by further ones",
    ),
    "filter batch": (
        {"schedule": {"filter_zero_variance": True}, "trainer": {"estimator": "batch"}},
        "still teach",
    ),
    "filter one": (
        {
            "schedule": {"filter_zero_variance": True},
            "groups": {"size": 1},
            "trainer": {"estimator": "mean"},
        },
        "would leave out every group",
    ),
    "readers": ({"trainer": {"ranks": 3, "readers": 2}}, "no multiple of trainer.readers"),
    "divided alone": ({"trainer": {"parallel": "fsdp"}}, "raise trainer.ranks"),
    "standardize": ({"trainer": {"standardize": True}}, 'applies to estimator "batch" only'),
    "band": ({"trainer": {"importance": [2.0, 3.0]}}, "no band around 1"),
    "reserve": (
        {"budget": {"max_generated_tokens": 8, "final_answer_reserve": 8}},
        "for the turns before the answer",
    ),
    "cause": ({"trainer": {"truncation_by_cause": {"boredom": "mask"}}}, "has no cause"),
    "overlong": ({"trainer": {"overlong_from": 5}}, "go together, from below to"),
    "flags": ({"engine": {"arguments": ["--x"]}}, 'needs engine.kind = "vllm"'),
    "learning rate": (
        {"steps": None, "tasks": {"epochs": 1}, "trainer": {"schedule": "cosine"}},
        "to know where it ends",
    ),
}


VALID = config()
OF_MEMBERS = 2
"""The rule that is there once for each member of a mix."""


@pytest.fixture(scope="module")
def broken_rules() -> set[int]:
    return set()


@pytest.fixture
def noted(broken_rules: set[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the rules that are broken while a configuration is made."""
    said: list[str] = []

    def conflicts(c: RunConfig) -> list[tuple[bool, str]]:
        found = validity.conflicts(c)
        more = len(found) - len(validity.conflicts(VALID))  # one rule a member of a mix
        for number, (refused, reason) in enumerate(found):
            if refused:
                broken_rules.add(number if number <= OF_MEMBERS else number - more)
                said.append(reason)
        return found

    monkeypatch.setattr(domain.config, "conflicts", conflicts)
    return said


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_refused_with_its_remedy(name: str, noted: list[str]) -> None:
    tables, words = BROKEN[name]
    with pytest.raises(ConfigError) as refused:
        RunConfig.parse(MINIMAL | {k: _merged(k, v) for k, v in tables.items()})
    assert words in str(refused.value)
    assert noted[0] in str(refused.value)


def _merged(name: str, value: Any) -> Any:
    return {**MINIMAL.get(name, {}), **value} if isinstance(value, dict) else value


def test_no_rule_is_without_a_case(broken_rules: set[int]) -> None:
    rules = validity.conflicts(VALID)
    untried = [rules[n][1] for n in range(len(rules)) if n not in broken_rules]
    assert untried == []


def test_what_is_acknowledged_is_not_refused() -> None:
    config(schedule=KEEP)
    config(schedule=MASK, groups=ending("discard"))
