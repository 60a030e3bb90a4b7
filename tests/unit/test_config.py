"""Bad configuration is refused at once, naming the key, the value and the remedy."""

from pathlib import Path
from typing import Any

import pytest

from domain.config import RunConfig
from domain.errors import ConfigError
from domain.services import Services

MINIMAL: dict[str, Any] = {
    "name": "r",
    "steps": 3,
    "tasks": {"source": "m:s", "dataset": "m:d"},
    "model": {"path": "model"},
    "groups": {"timeout": 60},
}


def config(**tables: dict[str, Any]) -> RunConfig:
    merged = {
        key: dict(value) if isinstance(value, dict) else value for key, value in MINIMAL.items()
    }
    for name, table in tables.items():
        merged[name] = {**merged.get(name, {}), **table}
    return RunConfig.parse(merged)


def test_the_minimal_configuration_has_the_documented_defaults() -> None:
    c = config()
    assert (c.schedule.order, c.schedule.stale_policy, c.schedule.max_lag) == (
        "deadline",
        "wait",
        2,
    )
    assert (c.schedule.ahead, c.schedule.sync_every, c.sampling.policy) == (1, 1, "trajectory")
    assert (c.trainer.importance, c.groups.completion.mode) == (5.0, "wait")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"schedule": {"ahed": 1}}, "unknown key 'schedule.ahed'; did you mean 'ahead'"),
        ({"groups": {"size": "four"}}, "groups.size = 'four'"),
        ({"schedule": {"max_lag": 0}}, "max_lag = 0 is below ahead"),
        ({"schedule": {"ahead": 3, "sync_every": 3, "max_lag": 4}}, "max_lag = 4 is below"),
        ({"schedule": {"stale_policy": "mask_span"}}, "allow_trajectory_loss = true"),
        ({"schedule": {"stale_policy": "keep"}}, "allow_unbounded_staleness = true"),
        ({"schedule": {"order": "admission"}}, "can hold for ever"),
        (
            {"schedule": {"filter_zero_variance": True}, "trainer": {"estimator": "batch"}},
            "filter_zero_variance needs another",
        ),
        (
            {"schedule": {"filter_zero_variance": True, "order": "dataset", "ahead": 0}},
            'which needs order "deadline" or "admission"',
        ),
        ({"schedule": {"order": "dataset"}}, "needs ahead = 0"),
        ({"groups": {"completion": {"mode": "deadline"}}}, "needs max_straggler_tokens"),
        ({"groups": {"size": 1}}, "groups.size must be at least 2"),
        ({"groups": {"admit": 3}}, 'needs schedule.order = "dataset"'),
        ({"sampling": {"policy": "segment"}}, "could never change its version"),
        ({"sampling": {"kv_cache": {"max_staleness": 1}}}, "only the default kv_cache"),
        ({"sampling": {"top_p": 0.9}}, "needs sampling.top_k too"),
        ({"sampling": {"min_p": 0.1}}, "needs sampling.top_k too"),
        ({"sampling": {"top_k": 5}, "trainer": {"width": 64}}, r"= 320 \(it is None\)"),
        (
            {
                "sampling": {"top_k": 5, "top_p": 0.9},
                "trainer": {"width": 64, "support_capacity": 319},
            },
            r"support_capacity >= top_k \* width = 320 \(it is 319\)",
        ),
        ({"trainer": {"importance": [0.5, 0.9]}}, "no band around 1"),
        ({"trainer": {"overflow": "cut"}}, 'needs overflow = "accumulate"'),
        ({"trainer": {"standardize": True}}, 'estimator "batch" only'),
        ({"trainer": {"exact": "order"}, "checkpoint": {"every": 2}}, "checkpoint.every must be 1"),
        ({"trainer": {"truncation_by_cause": {"turn": "mask"}}}, r"no cause \['turn'\]"),
        ({"budget": {"max_context_tokens": 65}, "trainer": {"width": 64}}, "exceeds trainer.width"),
        (
            {"budget": {"max_generated_tokens": 50, "final_answer_reserve": 50}},
            "reserve = 50 leaves",
        ),
        ({"model": {"tiny": {}}}, "exactly one of model.path"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**tables)


def test_filtered_sampling_with_room_for_every_kept_id_is_accepted() -> None:
    room = {"width": 64, "support_capacity": 320}
    assert config(sampling={"top_k": 5, "top_p": 0.9}, trainer=room).sampling.filtered


@pytest.mark.parametrize(
    ("ahead", "sync_every", "max_lag", "constructs"),
    [
        (1, 1, 1, True),
        (1, 1, 0, False),
        (2, 1, 1, False),
        (2, 1, 2, True),
        (1, 2, 1, False),
        (1, 2, 2, True),
        (2, 2, 2, False),  # W17
        (3, 2, 4, True),
        (3, 3, 4, False),
    ],
)
def test_s1_to_s8_bound_of_a_first_submission(
    ahead: int, sync_every: int, max_lag: int, constructs: bool
) -> None:
    schedule = {"ahead": ahead, "sync_every": sync_every, "max_lag": max_lag}
    if constructs:
        assert config(schedule=schedule).schedule.max_lag == max_lag
    else:
        with pytest.raises(ConfigError, match="max_lag"):
            config(schedule=schedule)


def test_a_file_remembers_its_folder_and_a_broken_one_is_named(tmp_path: Path) -> None:
    good = tmp_path / "run.toml"
    good.write_text(
        'name = "r"\nsteps = 1\n[tasks]\nsource="m:s"\ndataset="m:d"\n[model]\npath="m"\n'
    )
    assert RunConfig.load(good).root == str(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        RunConfig.load(bad)
    with pytest.raises(ConfigError, match="cannot read configuration"):
        RunConfig.load(tmp_path / "none.toml")


def test_services_hide_their_secrets_and_round_trip() -> None:
    environ = {
        "ROLLBOOK_DATABASE_URL": "postgresql://u:hidden1@h/db",
        "ROLLBOOK_TEMPORAL_ADDRESS": "h:7233",
        "ROLLBOOK_S3_ENDPOINT": "http://h:8333",
        "AWS_ACCESS_KEY_ID": "hidden2",
        "AWS_SECRET_ACCESS_KEY": "hidden3",
        "ROLLBOOK_ENGINES": "http://a, http://b",
    }
    services = Services.from_environment(environ)
    assert services.engines == ("http://a", "http://b")
    assert "hidden" not in repr(services)
    assert Services.from_environment(services.environment()) == services


def test_missing_service_addresses_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"ROLLBOOK_DATABASE_URL.*ROLLBOOK_S3_ENDPOINT"):
        Services.from_environment({})


MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
KEEP = {"stale_policy": "keep", "allow_unbounded_staleness": True}
DEADLINE = {"mode": "deadline", "max_straggler_tokens": 5}


def ending(on_stragglers: str) -> dict[str, Any]:
    return {"completion": {**DEADLINE, "on_stragglers": on_stragglers}}


@pytest.mark.parametrize(
    ("vector", "tables", "message"),
    [
        ("M14", {"schedule": {"stale_policy": "mask_span"}}, "allow_trajectory_loss = true"),
        ("K5", {"schedule": {"stale_policy": "keep"}}, "allow_unbounded_staleness = true"),
        ("V4", {"groups": {"size": 2, "completion": {**DEADLINE, "min_members": 3}}}, "exceeds"),
        (
            "V5",
            {"groups": ending("discard"), "schedule": {"allow_trajectory_loss": True}},
            "partial groups",
        ),
        ("V5b", {"groups": ending("carry_over")}, "partial groups"),
        ("V6", {"groups": ending("truncate")}, "allow_trajectory_loss = true"),
        ("V6b", {"groups": ending("discard"), "schedule": KEEP}, "allow_trajectory_loss = true"),
        ("V7", {"groups": ending("carry_over"), "schedule": MASK}, 'estimator "batch"'),
        (
            "V7b",
            {
                "groups": ending("carry_over"),
                "schedule": {**MASK, "ahead": 0},
                "trainer": {"estimator": "batch"},
            },
            "ahead >= 1",
        ),
        (
            "V8",
            {"sampling": {"policy": "segment", "kv_cache": {"on_limit": "refill"}}},
            "allow_reprefill = true",
        ),
        (
            "V5 resubmit",
            {
                "groups": ending("discard"),
                "schedule": {"stale_policy": "resubmit", "allow_trajectory_loss": True},
            },
            "partial groups",
        ),
        (
            "V7 dataset",
            {
                "groups": ending("carry_over"),
                "schedule": {**MASK, "order": "dataset"},
                "trainer": {"estimator": "batch"},
            },
            'order "deadline" or "admission"',
        ),
        (
            "V8 pinned",
            {"sampling": {"kv_cache": {"allow_reprefill": True}}},
            "keeps one version per rollout",
        ),
        ("V9", {"schedule": {"order": "admission"}}, "can hold for ever"),
        ("V10", {"groups": {"admit": 99}}, "must not exceed"),
        ("V10 rloo", {"groups": {"size": 1}, "trainer": {"estimator": "rloo"}}, "at least 2"),
        (
            "V15",
            {"schedule": {"max_lag": 1}, "trainer": {"importance": None}},
            "needs trainer.importance",
        ),
        (
            "a reserve that fills the context",
            {"trainer": {"width": 64}, "budget": {"final_answer_reserve": 64}},
            "of the context of 64",
        ),
    ],
)
def test_policy_settings_that_cannot_hold_together(
    vector: str, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**tables)


@pytest.mark.parametrize(
    ("vector", "tables"),
    [
        ("K6", {"schedule": {**KEEP, "ahead": 5, "max_lag": 0}}),
        ("V4", {"groups": {"completion": {"on_stragglers": "discard", "max_straggler_tokens": 1}}}),
        ("V4 all", {"groups": {"size": 2, **ending("truncate")}, "schedule": MASK}),
        ("V5", {"groups": ending("discard"), "schedule": MASK}),
        ("V6", {"groups": ending("truncate"), "schedule": {"allow_trajectory_loss": True}}),
        (
            "V7",
            {
                "groups": ending("carry_over"),
                "schedule": {**MASK, "order": "admission"},
                "trainer": {"estimator": "batch"},
            },
        ),
    ],
)
def test_policy_settings_that_hold_together(vector: str, tables: dict[str, Any]) -> None:
    config(**tables)
