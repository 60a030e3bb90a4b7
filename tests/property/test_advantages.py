"""What holds for the advantages of any rewards."""

from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.rollouts import Rollout, Segment, Status
from trainer.advantages import LARGEST_REWARD, Estimator, advantages
from trainer.members import judge, member_advantages

WITHIN_GROUP: tuple[Estimator, ...] = ("group", "mean", "rloo")

# Sixty-fourths are exact in float64, so that shifts and sums are too.
rewards = st.integers(-6400, 6400).map(lambda n: n / 64)
group = st.lists(rewards, min_size=2, max_size=12)
with_absent = st.lists(st.none() | rewards, max_size=10)


@given(group, st.sampled_from(WITHIN_GROUP))
def test_advantages_of_a_group_sum_to_zero(values: list[float], estimator: Estimator) -> None:
    found = advantages([values], estimator)[0]
    scale = max(1.0, *(abs(a) for a in found))
    assert sum(found) == pytest.approx(0, abs=1e-6 * scale * len(values))


@given(st.lists(with_absent, max_size=5), st.booleans())
def test_batch_advantages_sum_to_zero_over_the_batch(
    groups: list[list[float | None]], standardize: bool
) -> None:
    found = [
        a for of_group in advantages(groups, "batch", standardize=standardize) for a in of_group
    ]
    assert sum(found) == pytest.approx(
        0, abs=1e-6 * max([1.0, *map(abs, found)]) * (len(found) + 1)
    )


@given(group)
def test_leave_one_out_is_the_mean_scaled(values: list[float]) -> None:
    n = len(values)
    of_mean = advantages([values], "mean")[0]
    others = [reward - (sum(values) - reward) / (n - 1) for reward in values]
    assert advantages([values], "rloo")[0] == pytest.approx(
        [a * n / (n - 1) for a in of_mean], rel=1e-6, abs=1e-9
    )
    assert advantages([values], "rloo")[0] == pytest.approx(others, rel=1e-6, abs=1e-9)


@given(
    st.floats(-LARGEST_REWARD, LARGEST_REWARD),
    st.integers(1, 33),
    st.sampled_from(get_args(Estimator)),
)
def test_equal_rewards_give_exactly_zero(value: float, n: int, estimator: Estimator) -> None:
    assert advantages([[value] * n], estimator) == [[0.0] * n]


@given(group, st.integers(-1000, 1000), st.sampled_from(get_args(Estimator)))
def test_a_constant_added_to_every_reward_changes_nothing(
    values: list[float], shift: int, estimator: Estimator
) -> None:
    shifted = [reward + shift for reward in values]
    assert advantages([shifted], estimator)[0] == pytest.approx(
        advantages([values], estimator)[0], rel=1e-6, abs=1e-9
    )


@given(group, st.sampled_from([0.25, 0.5, 2.0, 1024.0]))
def test_a_factor_on_every_reward_changes_nothing_under_group(
    values: list[float], factor: float
) -> None:
    scaled = [reward * factor for reward in values]
    # the eps of 1e-6 stands against a deviation of 1/64 * 1/4 / sqrt(12) at least
    assert advantages([scaled])[0] == pytest.approx(advantages([values])[0], rel=2e-3)


@given(st.lists(with_absent, max_size=6), st.sampled_from(WITHIN_GROUP))
def test_groups_do_not_see_each_other_and_absent_members_change_nothing(
    groups: list[list[float | None]], estimator: Estimator
) -> None:
    found = advantages(groups, estimator)
    for values, of_group in zip(groups, found, strict=True):
        present = [reward for reward in values if reward is not None]
        alone = iter(advantages([present], estimator)[0])
        assert of_group == [0.0 if reward is None else next(alone) for reward in values]


@given(
    group,
    st.lists(st.sampled_from(["mask", "infra", "cancelled"]), max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from(get_args(Estimator)),
)
def test_members_outside_the_baseline_change_nothing(
    values: list[float], extras: list[str], random: Random, estimator: Estimator
) -> None:
    def member(sample: int, status: Status, reward: float | None) -> Rollout:
        cause = "tokens" if status is Status.TRUNCATED else None
        segment = Segment([1], [2], [-0.5], "stop", 0)
        return Rollout("t", 0, sample, 0, [segment], status, reward, cause=cause)

    inside = [member(i, Status.COMPLETED, reward) for i, reward in enumerate(values)]
    status = {"mask": Status.TRUNCATED, "infra": Status.INFRA_ERROR, "cancelled": Status.CANCELLED}
    outside = [member(100 + i, status[extra], 99.0) for i, extra in enumerate(extras)]
    everyone = [*inside, *outside]
    random.shuffle(everyone)
    found = dict(
        zip(
            (rollout.sample for rollout in everyone),
            member_advantages(everyone, judge(everyone), estimator),
            strict=True,
        )
    )
    expected = member_advantages(inside, judge(inside), estimator)
    assert [found[i] for i in range(len(inside))] == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert all(found[rollout.sample] == 0 for rollout in outside)
