"""Advantages and who counts: the hand vectors, and what must be refused."""

import math
from typing import get_args

import numpy as np
import pytest

from domain.groups import overlong_penalty
from domain.rollouts import Rollout, Segment, Status
from trainer.advantages import Estimator, advantages
from trainer.members import judge, member_advantages


def member(
    status: str,
    reward: float | None,
    sample: int = 0,
    *,
    group: int = 0,
    cause: str | None = None,
    tokens: int = 2,
) -> Rollout:
    segment = Segment([1], [2] * tokens, [-0.5] * tokens, "stop", 0)
    if status == "truncated":
        cause = cause or "tokens"
    return Rollout(f"t{group}", group, sample, 0, [segment], Status(status), reward, cause=cause)


STATUS_MIX = [
    member("completed", 1.0, 0),
    member("completed", 0.0, 1),
    member("truncated", 0.5, 2),
    member("agent_error", 0.25, 3),
]


@pytest.mark.parametrize(
    ("rewards", "estimator", "expected"),
    [
        ([1, 0, 0, 1, 0.5], "group", [0.999998, -0.999998, -0.999998, 0.999998, 0]),
        ([1, 0, 0, 1, 0.5], "mean", [0.5, -0.5, -0.5, 0.5, 0]),
        ([1, 0, 0, 1, 0.5], "rloo", [0.625, -0.625, -0.625, 0.625, 0]),
        ([1] + [0] * 7, "group", [2.4748667] + [-0.3535524] * 7),
        ([1] + [0] * 7, "mean", [0.875] + [-0.125] * 7),
        ([1] + [0] * 7, "rloo", [1.0] + [-1 / 7] * 7),
    ],
)
def test_hand_vectors(rewards: list[float], estimator: str, expected: list[float]) -> None:
    assert advantages([rewards], estimator)[0] == pytest.approx(expected, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("truncation", "estimator", "expected"),
    [
        ("mask", "group", [1.12089, -0.80064, 0, -0.32026]),
        ("mask", "mean", [0.58333, -0.41667, 0, -0.16667]),
        ("mask", "rloo", [0.875, -0.625, 0, -0.25]),
        ("score", "group", [1.31746, -1.02469, 0.14638, -0.43915]),
        ("score", "mean", [0.5625, -0.4375, 0.0625, -0.1875]),
        ("score", "rloo", [0.75, -0.58333, 0.08333, -0.25]),
        ("zero", "group", [1.45274, -0.66034, -0.66034, -0.13207]),
        ("zero", "mean", [0.6875, -0.3125, -0.3125, -0.0625]),
        ("zero", "rloo", [0.91667, -0.41667, -0.41667, -0.08333]),
        ("drop", "group", [1.31746, -1.02469, None, -0.43915]),
        ("drop", "mean", [0.5625, -0.4375, None, -0.1875]),
        ("drop", "rloo", [0.75, -0.58333, None, -0.25]),
    ],
)
def test_status_and_truncation_policy(
    truncation: str, estimator: str, expected: list[float | None]
) -> None:
    members = judge(STATUS_MIX, truncation=truncation)  # type: ignore[arg-type]
    values = member_advantages(STATUS_MIX, members, estimator)  # type: ignore[arg-type]
    for found, wanted, judged in zip(values, expected, members, strict=True):
        if wanted is None:
            assert not judged.trains
        else:
            assert found == pytest.approx(wanted, abs=1e-5)


def test_batch_has_one_mean_and_constant_groups_still_learn() -> None:
    groups = [[1.0, 0.0], [1.0, 1.0]]
    assert advantages(groups, "batch") == [[0.25, -0.75], [0.25, 0.25]]
    standardized = advantages(groups, "batch", standardize=True)
    assert standardized[0] == pytest.approx([0.57735, -1.73205], abs=1e-5)
    assert standardized[1] == pytest.approx([0.57735, 0.57735], abs=1e-5)


def test_batch_over_two_processes_equals_one() -> None:
    first: list[list[float | None]] = [[1.0, 0.0]]
    second: list[list[float | None]] = [[1.0, 1.0], [None, 0.5]]
    pool = [1.0, 0.0, 1.0, 1.0, 0.5]
    whole = advantages([*first, *second], "batch", standardize=True)
    parts = [advantages(part, "batch", standardize=True, pool=pool) for part in (first, second)]
    assert parts[0] + parts[1] == whole


def test_a_group_of_one_is_zero_not_nan_and_not_its_raw_reward() -> None:
    for estimator in get_args(Estimator):
        assert advantages([[0.7]], estimator) == [[0.0]]
        assert advantages([[0.7, None, None]], estimator) == [[0.0] * 3]
    assert advantages([], "group") == []
    assert advantages([[], [None]], "group") == [[], [0.0]]


def test_one_trained_member_among_infrastructure_errors_is_zero() -> None:
    group = [
        member("completed", 1.0, 0),
        member("infra_error", None, 1),
        member("cancelled", None, 2),
    ]
    assert member_advantages(group, judge(group)) == [0.0, 0.0, 0.0]


def test_one_trained_member_beside_dropped_ones_is_zero() -> None:
    group = [member("completed", 1.0, 0), member("truncated", 0.0, 1), member("truncated", 0.5, 2)]
    members = judge(group, truncation="drop")
    assert [m.reward for m in members] == [1.0, 0.0, 0.5]
    assert member_advantages(group, members, "mean") == [0.0, 0.0, 0.0]


def test_equal_rewards_give_no_float_noise() -> None:
    third = float(np.float32(0.3))
    for estimator in get_args(Estimator):
        assert advantages([[0.1] * 3], estimator) == [[0.0] * 3]  # whose float mean is not 0.1
        assert advantages([[0.3] * 8], estimator) == [[0.0] * 8]
        assert advantages([[third] * 7], estimator) == [[0.0] * 7]


def test_uneven_groups_do_not_mix_rows_of_other_prompts() -> None:
    groups: list[list[float | None]] = [[1, 0, 0, 1], [5, 6, 7], [0, 0, 0, 1]]
    alone = [advantages([group], "group")[0] for group in groups]
    assert advantages(groups, "group") == alone
    shuffled = [
        member("completed", r, i, group=g)
        for i in range(4)
        for g, rewards in enumerate(groups)
        for r in rewards[i : i + 1]
    ]
    values = member_advantages(shuffled, judge(shuffled))
    for rollout, value in zip(shuffled, values, strict=True):
        assert value == pytest.approx(alone[rollout.group][rollout.sample])


def test_groups_of_the_same_number_but_another_task_are_apart() -> None:
    rollouts = [
        member("completed", 1.0, 0, group=0),
        member("completed", 0.0, 1, group=0),
        Rollout("other", 0, 0, 0, [], Status.COMPLETED, 9.0),
        Rollout("other", 0, 1, 0, [], Status.COMPLETED, 7.0),
    ]
    assert member_advantages(rollouts, judge(rollouts), "mean") == [0.5, -0.5, 1.0, -1.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, True, False, 1e38])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        advantages([[0.0, reward]])
    with pytest.raises(ValueError, match=r"group 0, sample 1 .* reward"):
        judge([member("completed", 0.0, 0), member("completed", reward, 1)])


@pytest.mark.parametrize(
    ("status", "truncation"),
    [("completed", "mask"), ("agent_error", "mask"), ("truncated", "score")],
)
def test_a_missing_reward_is_never_made_up(status: str, truncation: str) -> None:
    with pytest.raises(ValueError, match=r"sample 1 .* no reward"):
        judge([member("completed", 1.0, 0), member(status, None, 1)], truncation=truncation)  # type: ignore[arg-type]


def test_three_policies_for_the_same_truncated_half_have_three_reward_means() -> None:
    batch = [member("completed", 1.0, i) for i in range(2)]
    batch += [member("truncated", 0.5, i) for i in range(2, 4)]
    means = {}
    for truncation in ("mask", "score", "zero"):
        rewards = [m.reward for m in judge(batch, truncation=truncation) if m.reward is not None]
        means[truncation] = sum(rewards) / len(rewards)
    assert means == {"mask": 1.0, "score": 0.75, "zero": 0.5}


def test_a_cause_can_have_its_own_policy() -> None:
    batch = [
        member("truncated", 0.5, 0, cause="turns"),
        member("truncated", 0.5, 1, cause="tokens"),
        member("truncated", None, 2, cause="context"),
    ]
    judged = judge(
        batch, truncation="mask", truncation_by_cause={"turns": "score", "tokens": "zero"}
    )
    assert [(m.reward, m.trains) for m in judged] == [(0.5, True), (0.0, True), (None, False)]


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="estimator 'grpo' is unknown; choose one of group"):
        advantages([[1.0]], "grpo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncation 'half' is unknown; choose one of mask"):
        judge([], truncation="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cause 'timeout' is unknown"):
        judge([], truncation_by_cause={"timeout": "zero"})
    with pytest.raises(ValueError, match="belong to estimator 'batch'"):
        advantages([[1.0]], "mean", standardize=True)


def test_the_soft_overlong_penalty_falls_from_its_start_to_its_stop() -> None:
    assert [overlong_penalty(n, 80, 100) for n in (10, 80, 90, 100, 500)] == [0, 0, -0.5, -1, -1]
    batch = [member("completed", 1.0, 0, tokens=80), member("completed", 1.0, 1, tokens=90)]
    judged = judge(batch, overlong=(80, 100))
    assert [m.reward for m in judged] == [1.0, 0.5]
    assert member_advantages(batch, judged, "mean") == [0.25, -0.25]
    with pytest.raises(ValueError, match="must rise"):
        judge([], overlong=(100, 80))
