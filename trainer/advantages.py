"""Advantages: how much better a rollout did than the others of its group (or of its batch).

    group    (R - mean) / (s1 + 1e-6)      GRPO, arXiv:2402.03300; s1 = std with n - 1
    mean     R - mean                      Dr. GRPO, arXiv:2503.20783
    rloo     R - mean of the others        RLOO, arXiv:2402.14740 = n / (n - 1) * (R - mean)
    batch    R - mean of the whole batch   optionally / max(s0, 1e-8); s0 = std with n

One number per rollout, for every trainable token of all its chains. Three rules keep noise out:
fewer than two rewards to compare give 0; equal rewards give exactly 0 (in float32 eight rewards of
0.3 would give 0.03 under `group`); a reward that is not a finite number is refused, never replaced.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Estimator = Literal["group", "mean", "rloo", "batch"]

GROUP_EPS = 1e-6
BATCH_EPS = 1e-8
LARGEST_REWARD = 1e37  # differences of two must still be finite in float32


def advantages(
    groups: Sequence[Sequence[float | None]],
    estimator: Estimator = "group",
    *,
    standardize: bool = False,
    pool: Sequence[float] | None = None,
) -> list[list[float]]:
    """Advantages of the members of each group, in the order given.

    Args:
        groups: rewards by group; None = the member is outside the baseline and gets 0.0.
        estimator: see the module docstring.
        standardize: divide `batch` advantages by the batch's standard deviation.
        pool: under `batch`, every reward of the step when other trainer processes hold the rest of
            it; default: those in `groups`.

    Returns:
        float32 values, computed in float64.

    Raises:
        ValueError: an unknown estimator, `standardize` or `pool` without `batch`, or a reward that
            is a bool, not finite or beyond LARGEST_REWARD.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(
            f"estimator {estimator!r} is unknown; choose one of {', '.join(get_args(Estimator))}"
        )
    if estimator != "batch" and (standardize or pool is not None):
        raise ValueError(
            f"standardize and pool belong to estimator 'batch', not to {estimator!r}; "
            "'group' divides by the group's own standard deviation"
        )
    present = np.array([reward is not None for group in groups for reward in group], dtype=bool)
    rewards = np.array(
        [check_reward(reward) for group in groups for reward in group if reward is not None]
    )
    sizes = np.array([len(group) for group in groups], dtype=np.intp)
    owner = np.repeat(np.arange(len(groups)), sizes)[present]
    if estimator == "batch":
        whole = rewards if pool is None else np.array([check_reward(reward) for reward in pool])
        values = _against_batch(rewards, whole, standardize)
    else:
        values = _within_groups(rewards, owner, len(groups), estimator)
    everyone = np.zeros(len(present), dtype=np.float32)
    everyone[present] = values
    bounds = [0, *np.cumsum(sizes).tolist()]
    flat: list[float] = everyone.tolist()
    return [flat[start:stop] for start, stop in pairwise(bounds)]


def check_reward(reward: float) -> float:
    """The reward itself.

    Raises:
        ValueError: it is a bool, no number, not finite, or beyond LARGEST_REWARD.
    """
    if isinstance(reward, (bool, np.bool_)):
        raise ValueError(f"reward {reward!r} is a bool; a verifier returns a number, such as 1.0")
    value = float(reward)
    if not abs(value) <= LARGEST_REWARD:
        raise ValueError(
            f"reward {reward!r} is not a finite number within ±{LARGEST_REWARD:g}; fix the verifier"
        )
    return value


def _within_groups(
    rewards: NDArray[np.float64], owner: NDArray[np.intp], groups: int, estimator: Estimator
) -> NDArray[np.float64]:
    if rewards.size == 0:
        return rewards
    count = np.bincount(owner, minlength=groups)
    highest = np.full(groups, -np.inf)
    lowest = np.full(groups, np.inf)
    np.maximum.at(highest, owner, rewards)
    np.minimum.at(lowest, owner, rewards)
    signal = (count >= 2) & (highest > lowest)
    n = np.maximum(count, 1)
    centred: NDArray[np.float64] = rewards - (np.bincount(owner, rewards, groups) / n)[owner]
    others = np.maximum(n - 1, 1)
    if estimator == "rloo":
        centred = centred * (n / others)[owner]
    elif estimator == "group":
        s1 = np.sqrt(np.bincount(owner, centred**2, groups) / others)
        centred = centred / (s1 + GROUP_EPS)[owner]
    return np.where(signal[owner], centred, 0.0)


def _against_batch(
    rewards: NDArray[np.float64], whole: NDArray[np.float64], standardize: bool
) -> NDArray[np.float64]:
    if whole.size < 2 or whole.max() == whole.min():
        return np.zeros_like(rewards)
    centred: NDArray[np.float64] = rewards - whole.mean()
    return centred / max(float(whole.std()), BATCH_EPS) if standardize else centred
