"""What becomes of a finished rollout in its group: the admission table, one row per outcome.

outcome                              verdict                 counts as failure
completed, agent_error               joins                   –
truncated under mask, zero, drop     joins                   –
truncated under score, with reward   joins, trains on it     –
truncated under score, no reward     again, `unscored`       yes
infra_error                          again, `infra_error`    yes (a platform loss: no)
cancelled by the source              again, `cancelled`      yes
too old (any of the above)           again, `stale`          no
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from domain.rollouts import Status

Truncation = Literal["mask", "score", "zero", "drop"]
ResubmitCause = Literal["infra_error", "cancelled", "stale", "timeout", "unscored"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a rollout joins its group, or is tried again and why."""

    joins: bool
    resubmit: ResubmitCause | None = None
    failure: bool = False


def truncation_policy(
    default: Truncation, by_cause: Mapping[str, Truncation], cause: str | None
) -> Truncation:
    """The policy for a truncation cause; a cause without an entry takes the default."""
    return by_cause.get(cause, default) if cause is not None else default


def verdict(status: Status, reward: float | None, policy: Truncation = "mask") -> Verdict:
    """The admission table, age aside (`domain.staleness.too_old`).

    Raises:
        ValueError: a scored status came without its reward; the verifier should have been blamed.
    """
    match status:
        case Status.COMPLETED | Status.AGENT_ERROR:
            if reward is None:
                raise ValueError(f"a rollout with status {status} must have a reward")
            return Verdict(joins=True)
        case Status.TRUNCATED:
            if policy == "score" and reward is None:
                return Verdict(joins=False, resubmit="unscored", failure=True)
            return Verdict(joins=True)
        case Status.INFRA_ERROR:
            return Verdict(joins=False, resubmit="infra_error", failure=True)
        case Status.CANCELLED:
            return Verdict(joins=False, resubmit="cancelled", failure=True)


def trains(status: Status, policy: Truncation) -> bool:
    """Whether the member's own tokens take loss, and so take rows."""
    return status is not Status.TRUNCATED or policy in ("score", "zero")


def overlong_penalty(tokens: int, start: int, stop: int) -> float:
    """0 up to `start` sampled tokens of the rollout, -1 from `stop` on, linear in between.

    DAPO's soft punishment, arXiv:2503.14476; it is added to the reward before anything is compared.
    """
    return -min(max(tokens - start, 0) / (stop - start), 1.0)


def teaches(members: Sequence[tuple[float | None, bool]]) -> bool:
    """Whether a group's members differ: otherwise every advantage within the group is exactly 0.

    Args:
        members: of each, the reward that enters the baseline (None: it stays outside) and whether
            its own tokens take loss.
    """
    compared = [reward for reward, _ in members if reward is not None]
    return sum(takes_loss for _, takes_loss in members) >= 2 and min(compared) < max(compared)


def baseline_reward(status: Status, reward: float | None, policy: Truncation) -> float | None:
    """The reward that enters the group's baseline; None: the member stays outside it."""
    if status is not Status.TRUNCATED:
        return reward
    match policy:
        case "mask":
            return None
        case "zero":
            return 0.0
        case "score" | "drop":
            return reward
