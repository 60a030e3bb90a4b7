"""The figures of a step's data, on the worked example of packing."""

import dataclasses

import pytest

from domain.config import Trainer
from domain.rollouts import Rollout, Segment, Status
from trainer.metrics import of_batch
from trainer.packing import pack

CONFIG = Trainer(width=12, rows=4, estimator="mean")


def segment(prompt: list[int], sampled: list[int], version: int, cached: int = 0) -> Segment:
    logprobs = [-0.1] * len(sampled)
    return Segment(prompt, sampled, logprobs, "stop", version, cached_prompt_tokens=cached)


def rollout(sample: int, status: str, reward: float | None, segments: list[Segment]) -> Rollout:
    cause = "tokens" if status == "truncated" else None
    return Rollout("t", 0, sample, 0, segments, Status(status), reward, cause=cause)


WORKED = [
    rollout(0, "completed", 1.0, [segment([1, 2, 3], [4, 5], 3),
                                  segment([1, 2, 3, 4, 5, 9, 9], [6, 7], 4, 5)]),
    rollout(1, "completed", 0.0, [segment([1, 2, 3], [8, 5], 3), segment([1, 2, 3, 8, 7], [6], 4)]),
    rollout(2, "truncated", 0.5, [segment([1, 2, 3], [4], 3)]),
    rollout(3, "agent_error", 0.25, [segment([1, 2, 3], [7, 7, 7], 4, 3)]),
]  # fmt: skip


def test_the_worked_example() -> None:
    packed = pack(WORKED, 12, rows=4, estimator="mean")
    told = of_batch(WORKED, packed, CONFIG, 5, latencies=[1, 2, 3, 10], cancelled_tokens=[20, 30])
    expected = {
        "status/completed": 0.5,
        "status/truncated": 0.25,
        "status/agent_error": 0.25,
        "masked/truncated": 1 / 11,
        "reward/mean": 0.416667,
        "reward/zero_variance_group_frac": 0,
        "latency/p50": 2.5,
        "latency/p90": 7.9,
        "latency/p99": 9.79,
        "latency/max": 10,
        "lag/mean": 1.4,
        "lag/max": 2,
        "lag/hist/1": 6,
        "lag/hist/2": 4,
        "pack/fill": 26 / 48,
        "pack/rows": 4,
        "merge/calls_per_chain": 1.25,
        "staleness/frac_masked": 0,
        "staleness/span_age_p99": 2,
        "sampling/cached_prompt_fraction": 8 / 24,
        "length/admitted": 11 / 4,
        "length/cancelled": 25,
        "tokens/sampled": 11,
        "tokens/trained": 10,
        "tokens/packed": 26,
    }
    assert told == pytest.approx(expected, abs=1e-6)


def test_what_is_masked_is_told_in_sampled_ids() -> None:
    cut = rollout(2, "truncated", 0.5, [segment([1, 2, 3], [4, 5, 6], 3)])
    longer = [*WORKED[:2], cut, WORKED[3]]
    assert of_batch(longer, pack(longer, 12), CONFIG, 5)["masked/truncated"] == 3 / 13


def test_rewards_are_those_that_trained() -> None:
    config = CONFIG.model_copy(update={"truncation": "zero"})
    told = of_batch(WORKED, pack(WORKED, 12, truncation="zero"), config, 5)
    assert told["reward/mean"] == pytest.approx(1.25 / 4)
    assert "masked/truncated" not in told
    config = CONFIG.model_copy(update={"truncation": "drop"})
    told = of_batch(WORKED, pack(WORKED, 12, truncation="drop"), config, 5)
    assert told["reward/mean"] == pytest.approx(1.25 / 3)
    config = CONFIG.model_copy(update={"overlong_from": 2, "overlong_to": 4})
    told = of_batch(WORKED, pack(WORKED, 12, overlong=(2, 4)), config, 5)
    assert told["reward/mean"] == pytest.approx((0 - 0.5 - 0.25) / 3)  # 4, 3 and 3 sampled ids


def test_components_are_means_over_the_trained_rollouts_that_name_them() -> None:
    group = [
        dataclasses.replace(WORKED[0], components={"format": 0.2, "answer": 1.0}),
        dataclasses.replace(WORKED[1], components={"format": 0.4}),
        dataclasses.replace(WORKED[2], components={"format": 9.0}),  # masked
    ]
    told = of_batch(group, pack(group, 12), CONFIG, 5)
    assert told["reward/component/format"] == pytest.approx(0.3)
    assert told["reward/component/answer"] == 1.0


def test_the_zero_variance_share_is_counted_by_group() -> None:
    flat = [dataclasses.replace(WORKED[i], task="flat", group=1, reward=1.0) for i in (0, 1)]
    both = [*WORKED, *flat]
    told = of_batch(both, pack(both, 12), CONFIG, 5)
    assert told["reward/zero_variance_group_frac"] == 0.5


def test_old_tokens_count_as_masked_even_where_a_rollout_lost_all_of_them() -> None:
    pinned = rollout(1, "completed", 0.0, [segment([1], [2, 3, 4], 10)])
    mixed = rollout(0, "completed", 1.0, [segment([1], [2], 10), segment([1, 2], [3], 12)])
    packed = pack([mixed, pinned], 8, trainer_version=13, max_lag=2, stale_policy="mask_span")
    told = of_batch([mixed, pinned], packed, CONFIG, 13)
    assert told["staleness/frac_masked"] == pytest.approx(4 / 5)
    assert told["staleness/span_age_p99"] == 3
    assert (told["lag/mean"], told["lag/max"]) == (1, 1)


def test_nothing_to_count_is_left_out() -> None:
    masked = [WORKED[2]]
    told = of_batch(masked, pack(masked, 12, rows=1), CONFIG, 5)
    assert told["pack/fill"] == 0
    assert not {n for n in told if n.startswith(("reward/", "lag/", "latency/", "merge/"))}
    assert of_batch([], pack([], 12), CONFIG, 5) == {
        "tokens/sampled": 0, "tokens/packed": 0, "tokens/trained": 0, "pack/rows": 0,
    }  # fmt: skip
