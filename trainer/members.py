"""Who counts: which rollouts enter the baseline, which take loss, and at what reward.

                          reward in the baseline    loss on its tokens
completed, agent_error    its reward                yes
truncated, `mask`         none                      no
truncated, `score`        its reward                yes
truncated, `zero`         0.0                       yes
truncated, `drop`         its reward, if it has one no
infra_error, cancelled    none                      no

A group (under `batch`: the batch) with fewer than two members that take loss has advantage 0 for
everyone: there is nothing to compare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, get_args

from domain.groups import (
    Truncation,
    baseline_reward,
    overlong_penalty,
    trains,
    truncation_policy,
)
from domain.rollouts import SCORED, TRUNCATION_CAUSES, Rollout
from trainer.advantages import Estimator, advantages, check_reward


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout as the estimator sees it."""

    reward: float | None
    """The trained reward; None: outside the baseline."""
    trains: bool
    """Whether its tokens take loss, and so take rows."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What `batch` compares with when other processes hold the rest of the step: all of it."""

    rewards: Sequence[float]
    """Of every member that is in the baseline."""
    trained: int
    """Members that take loss; `drop` keeps some in the baseline that do not."""

    @classmethod
    def of(cls, members: Sequence[Member]) -> Self:
        """Of the members of one process."""
        rewards = [member.reward for member in members if member.reward is not None]
        return cls(rewards, sum(member.trains for member in members))

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """Of what each process has."""
        rewards = [reward for part in parts for reward in part.rewards]
        return cls(rewards, sum(part.trained for part in parts))


def judge(
    rollouts: Sequence[Rollout],
    *,
    truncation: Truncation = "mask",
    truncation_by_cause: Mapping[str, Truncation] | None = None,
    overlong: tuple[int, int] | None = None,
) -> list[Member]:
    """The table of the module docstring, with the soft overlong penalty on top.

    Args:
        rollouts: in any order.
        truncation: policy for truncated members.
        truncation_by_cause: exceptions by truncation cause.
        overlong: `(start, stop)` in sampled tokens of the whole rollout; rewards fall linearly from
            `start` on, by 1 at `stop` and beyond (DAPO, arXiv:2503.14476).

    Raises:
        ValueError: an unknown policy or cause, or a scored member without a usable reward.
    """
    by_cause = truncation_by_cause or {}
    _check_policies(truncation, by_cause)
    if overlong is not None and not 0 <= overlong[0] < overlong[1]:
        raise ValueError(f"overlong = {overlong} must rise: (start, stop) with 0 <= start < stop")
    return [_judge(rollout, truncation, by_cause, overlong) for rollout in rollouts]


def group_members(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Indices of the members of each (task, group), in order of first appearance."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault((rollout.task, rollout.group), []).append(index)
    return list(groups.values())


def member_advantages(
    rollouts: Sequence[Rollout],
    members: Sequence[Member],
    estimator: Estimator = "group",
    *,
    standardize: bool = False,
    pool: Pool | None = None,
) -> list[float]:
    """The advantage of each rollout.

    Args:
        rollouts: members of whole groups.
        members: what `judge` says of them.
        estimator: see `trainer.advantages`.
        standardize: see `trainer.advantages.advantages`.
        pool: under `batch`, the whole step of several processes.
    """
    groups = group_members(rollouts)
    rewards = [[members[i].reward for i in group] for group in groups]
    of_all = None if pool is None else pool.rewards
    values = advantages(rewards, estimator, standardize=standardize, pool=of_all)
    trained_in_batch = (pool or Pool.of(members)).trained
    result = [0.0] * len(rollouts)
    for group, of_group in zip(groups, values, strict=True):
        trained = (
            trained_in_batch if estimator == "batch" else sum(members[i].trains for i in group)
        )
        if trained >= 2:
            for index, value in zip(group, of_group, strict=True):
                result[index] = value
    return result


def _judge(
    rollout: Rollout,
    truncation: Truncation,
    by_cause: Mapping[str, Truncation],
    overlong: tuple[int, int] | None,
) -> Member:
    if rollout.status not in SCORED:
        return Member(None, trains=False)
    policy = truncation_policy(truncation, by_cause, rollout.cause)
    takes_loss = trains(rollout.status, policy)
    reward = baseline_reward(rollout.status, rollout.reward, policy)
    try:
        if reward is not None:
            reward = check_reward(reward)
        elif takes_loss:
            raise ValueError("its verifier gave no reward")
    except ValueError as error:
        raise ValueError(
            f"task {rollout.task!r}, group {rollout.group}, sample {rollout.sample} "
            f"({rollout.status}) cannot be scored: {error}"
        ) from None
    if reward is not None and overlong is not None:
        reward += overlong_penalty(rollout.policy_tokens, *overlong)
    return Member(reward, takes_loss)


def _check_policies(truncation: Truncation, by_cause: Mapping[str, Truncation]) -> None:
    for policy in (truncation, *by_cause.values()):
        if policy not in get_args(Truncation):
            raise ValueError(
                f"truncation {policy!r} is unknown; choose one of {', '.join(get_args(Truncation))}"
            )
    for cause in by_cause:
        if cause not in TRUNCATION_CAUSES:
            raise ValueError(
                f"truncation cause {cause!r} is unknown; causes are {', '.join(TRUNCATION_CAUSES)}"
            )
