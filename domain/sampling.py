"""Budget arithmetic: how many tokens the next sampling request may ask for.

A turn may take several requests (*segments*). Every request gets only what is left of the turn, the
rollout and the context, so that a continuation never gets the full budget again.
"""

from dataclasses import dataclass
from typing import Literal

from domain.config import RunConfig

Exhausted = Literal["tokens", "turn_tokens", "context"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The token limits of one rollout (`[budget]`)."""

    generated: int
    context: int
    segment: int
    turn: int | None = None
    reserve: int = 0  # kept back for the final answer

    @classmethod
    def of(cls, config: RunConfig) -> "Limits":
        """The limits of a run's rollouts."""
        return cls(
            generated=config.budget.max_generated_tokens,
            context=config.max_context_tokens,
            segment=config.budget.segment_tokens,
            turn=config.budget.max_turn_tokens,
            reserve=config.budget.final_answer_reserve,
        )


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a rollout has used so far, in tokens."""

    generated: int  # sampled, over all chains
    context: int  # of the prompt that the next request sends
    turn: int = 0  # sampled in the turn that is being continued


def next_request(
    limits: Limits, spent: Spent, *, answering: bool = False, turn_cap: int | None = None
) -> int | Exhausted:
    """Tokens that the next request may sample, or the budget that is used up.

    The reserve is held back from the rollout's tokens and from the context until the final answer
    is asked for (`answering`).

    Example: `generated=100, segment=40`: requests of 40, 40 and 20 tokens, then `"tokens"`.

    Args:
        limits: What the run allows.
        spent: What the rollout has used.
        answering: The final answer is being sampled, so the reserve may be used.
        turn_cap: A lower limit for this turn, from the environment.
    """
    reserve = 0 if answering else limits.reserve
    caps = [cap for cap in (limits.turn, turn_cap) if cap is not None]
    left: dict[Exhausted, int] = {
        "tokens": limits.generated - reserve - spent.generated,
        "context": limits.context - reserve - spent.context,
    }
    if caps:
        left["turn_tokens"] = min(caps) - spent.turn
    for cause, tokens in left.items():
        if tokens <= 0:
            return cause
    return min(limits.segment, *left.values())
