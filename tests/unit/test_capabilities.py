"""An engine that cannot do what a run needs is refused before anything is sampled."""

from pathlib import Path
from typing import Any

import pytest

from domain.capabilities import BUILT_IN, IMAGES, missing, of_vllm
from domain.config import RunConfig
from domain.data import TaskStream
from domain.environments import PromptSource
from domain.errors import ConfigError
from domain.risks import acknowledged
from domain.rollouts import Task
from rollbook.preflight import check_engine, check_parts


def config(**tables: Any) -> RunConfig:
    base: dict[str, Any] = {
        "name": "r",
        "steps": 3,
        "tasks": {"source": "m:s", "dataset": "m:d"},
        "model": {"path": "model"},
    }
    return RunConfig.parse(base | tables)


SEGMENT = {"policy": "segment", "kv_cache": {"max_staleness": 1}}
REFILL = {
    "policy": "segment",
    "kv_cache": {"max_staleness": 1, "on_limit": "refill", "allow_reprefill": True},
}
FILTERED = {
    "sampling": {"top_k": 2},
    "trainer": {"width": 8, "support_capacity": 16},
    "budget": {"max_generated_tokens": 4},
}


@pytest.mark.parametrize("stale_policy", ["wait", "resubmit"])
@pytest.mark.parametrize(("slots", "enough"), [(2, False), (3, True)])
def test_v12_trajectory_needs_a_slot_for_each_version_within_the_bound(
    stale_policy: str, slots: int, enough: bool
) -> None:
    c = config(schedule={"stale_policy": stale_policy, "max_lag": 2})
    said = missing(c, max_resident=slots, capabilities=())
    assert (said == []) is enough
    assert enough or "holds 2 versions" in said[0]
    assert enough or "max_lag = 2" in said[0]


def test_v12_pins_without_a_bound_are_left_to_the_resident_limit() -> None:
    schedule = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
    assert missing(config(schedule=schedule), max_resident=1, capabilities=()) == []


@pytest.mark.parametrize(
    ("tables", "lacking"),
    [
        ({"sampling": SEGMENT}, "version_spans"),
        ({"sampling": SEGMENT}, "kv_provenance"),
        ({"sampling": SEGMENT}, "retained_kv"),
        ({"sampling": REFILL}, "refill"),
        (FILTERED, "kept_sets"),
    ],
)
def test_a_missing_capability_is_named_with_the_setting_that_needs_it(
    tables: dict[str, Any], lacking: str
) -> None:
    c = config(**tables)
    assert missing(c, max_resident=4, capabilities=BUILT_IN) == []
    without = [name for name in BUILT_IN if name != lacking]
    (said,) = missing(c, max_resident=4, capabilities=without)
    assert f"lacks '{lacking}'" in said


@pytest.mark.parametrize(
    ("tables", "able", "unable", "lacking"),
    [
        ({"sampling": SEGMENT}, {"adapters": False}, {"adapters": True}, "retained_kv"),
        (FILTERED, {"kept_sets": True}, {"kept_sets": False}, "kept_sets"),
    ],
)
def test_what_vllm_can_do_depends_on_how_it_is_started(
    tables: dict[str, Any], able: dict[str, bool], unable: dict[str, bool], lacking: str
) -> None:
    started = {"adapters": False, "kept_sets": False}
    assert missing(config(**tables), max_resident=4, capabilities=of_vllm(**started | able)) == []
    (said,) = missing(config(**tables), max_resident=4, capabilities=of_vllm(**started | unable))
    assert f"lacks '{lacking}'" in said


def test_images_must_be_declared_so_that_every_engine_is_asked_for_them_first() -> None:
    c = config(budget={"max_images": 2})
    assert missing(c, max_resident=4, capabilities=[*BUILT_IN, IMAGES]) == []
    (said,) = missing(c, max_resident=4, capabilities=BUILT_IN)
    assert "lacks 'images', which budget.max_images needs; use an engine that has it" in said
    assert "built-in" not in said
    with pytest.raises(ConfigError, match=r"the built-in engine cannot sample .* lacks 'images'"):
        check_engine(c, own=True)


@pytest.mark.parametrize("build", ["cpu", "gpu", "none"])
def test_a_runs_own_vllm_is_asked_what_it_can_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {build}\n")
    python.chmod(0o700)
    monkeypatch.setenv("ROLLBOOK_VLLM_PYTHON", str(python))
    filtered = FILTERED | {"sampling": SEGMENT | {"top_k": 2}}
    c = config(engine={"kind": "vllm"}, **filtered)
    if build == "gpu":
        check_engine(c, own=True)
        return
    words = {
        "cpu": r"vLLM cannot sample .* lacks 'kept_sets', which filtered",
        "none": "has no vLLM",
    }
    with pytest.raises(ConfigError, match=words[build]):
        check_engine(c, own=True)


def test_a_run_that_wants_vllm_and_names_none_is_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLBOOK_VLLM_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"needs ROLLBOOK_VLLM_PYTHON.*make vllm"):
        check_engine(config(engine={"kind": "vllm"}), own=True)
    check_engine(config(engine={"kind": "vllm"}), own=False)  # whoever started one knows it


def test_the_trainer_of_rollbook_scores_no_images() -> None:
    c = config(budget={"max_images": 2})
    with pytest.raises(ConfigError, match=r"max_images = 2: .*rollbook[.]RolloutScheduler"):
        check_parts(
            c, PromptSource(lambda text, task: 0.0), TaskStream(tasks=[Task("t")], batch_size=1)
        )


def test_the_default_run_needs_nothing_special_and_risks_nothing() -> None:
    assert missing(config(), max_resident=3, capabilities=()) == []
    assert acknowledged(config()) == []


MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
DEADLINE = {"mode": "deadline", "max_straggler_tokens": 9}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"schedule": MASK}, ["mask_span", "a slow one loses all", "frac_masked"]),
        (
            {"schedule": MASK, "sampling": SEGMENT},
            ["more than 2 versions old", "no single version"],
        ),
        (
            {"schedule": {"stale_policy": "keep", "allow_unbounded_staleness": True}},
            ["any age", "5.0", "lag/max"],
        ),
        (
            {"schedule": {"allow_trajectory_loss": True}, "groups": {"completion": DEADLINE}},
            ["9 tokens after 2", "trained truncated"],
        ),
        (
            {
                "schedule": MASK,
                "groups": {"completion": {**DEADLINE, "on_stragglers": "discard"}},
            },
            ["missing from the baseline"],
        ),
        (
            {
                "schedule": MASK,
                "groups": {"completion": {**DEADLINE, "on_stragglers": "carry_over"}},
                "trainer": {"estimator": "batch"},
            },
            ["later than their siblings"],
        ),
        ({"sampling": REFILL}, ["computed again", "cached_prompt_fraction"]),
        ({"sampling": {"on_resident_limit": "cancel"}}, ["oldest rollouts are cancelled"]),
        (
            {
                "schedule": {"order": "dataset", "stale_policy": "resubmit"},
                "trainer": {"overflow": "cut", "rows": 4},
            },
            ["groups.size = 8 above trainer.rows = 4"],
        ),
    ],
)
def test_every_acknowledged_risk_names_its_cost(tables: dict[str, Any], words: list[str]) -> None:
    said = " ".join(acknowledged(config(**tables)))
    assert all(word in said for word in words), said


def test_a_cost_is_named_only_where_it_can_arise() -> None:
    (said,) = acknowledged(config(schedule={**MASK, "max_lag": 3}, sampling=SEGMENT))[:1]
    assert "pinned" not in said
    cut = {"overflow": "cut", "rows": 8}
    schedule = {"order": "dataset", "stale_policy": "resubmit"}
    assert acknowledged(config(schedule=schedule, trainer=cut)) == []
