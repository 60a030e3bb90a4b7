"""The admission table: every status, truncation policy and reward."""

import pytest

from domain.groups import Truncation, baseline_reward, trains, truncation_policy, verdict
from domain.rollouts import Status


@pytest.mark.parametrize(
    ("status", "reward", "policy", "joins", "cause", "failure"),
    [
        (Status.COMPLETED, 1.0, "mask", True, None, False),
        (Status.AGENT_ERROR, 0.0, "mask", True, None, False),
        (Status.TRUNCATED, None, "mask", True, None, False),
        (Status.TRUNCATED, None, "zero", True, None, False),
        (Status.TRUNCATED, 0.5, "drop", True, None, False),
        (Status.TRUNCATED, 0.5, "score", True, None, False),
        (Status.TRUNCATED, None, "score", False, "unscored", True),
        (Status.INFRA_ERROR, None, "mask", False, "infra_error", True),
        (Status.CANCELLED, None, "mask", False, "cancelled", True),
    ],
)
def test_admission_table(
    status: Status,
    reward: float | None,
    policy: Truncation,
    joins: bool,
    cause: str | None,
    failure: bool,
) -> None:
    answer = verdict(status, reward, policy)
    assert (answer.joins, answer.resubmit, answer.failure) == (joins, cause, failure)


def test_a_missing_reward_never_becomes_zero() -> None:
    with pytest.raises(ValueError, match="must have a reward"):
        verdict(Status.COMPLETED, None)


@pytest.mark.parametrize(
    ("policy", "takes_loss", "baseline"),
    [("mask", False, None), ("score", True, 0.5), ("zero", True, 0.0), ("drop", False, 0.5)],
)
def test_what_a_truncated_member_contributes(
    policy: Truncation, takes_loss: bool, baseline: float | None
) -> None:
    assert trains(Status.TRUNCATED, policy) is takes_loss
    assert baseline_reward(Status.TRUNCATED, 0.5, policy) == baseline


def test_cause_overrides_the_default_truncation() -> None:
    assert truncation_policy("mask", {"tokens": "zero"}, "tokens") == "zero"
    assert truncation_policy("mask", {"tokens": "zero"}, "turns") == "mask"
