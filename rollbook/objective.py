"""What a loop of one's own says about its weights: its state, and how it scores packed rows."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np

from domain.errors import ConfigError
from trainer.packing import Packed


class State(Protocol):
    """The loop's trainer state."""

    @property
    def updates(self) -> int:
        """Steps that changed the weights: the policy version."""

    @property
    def weights(self) -> Any:
        """What the publisher takes."""


class Objective(Protocol):
    """How the loop scores and weighs tokens."""

    @property
    def importance(self) -> float | tuple[float, float] | None:
        """Cap, or band (low, high), on proximal over behaviour; `max_lag > 0` needs one."""

    def packed_log_probs(self, state: Any, packed: Mapping[str, Any]) -> Any:
        """Log-probability of each id under `response_mask`, `[rows, width]`, on the id it scores;
        under the sampler's temperature and, where sampling was filtered, on its kept set."""


def proximal(
    objective: Objective, state: State, rows: Packed, version: int
) -> tuple[Any, dict[str, float]]:
    """The rows' log-probabilities under the weights before the update, as the objective gives them,
    and how far they are from those of the sampler.

    Args:
        objective: scores.
        state: has the weights.
        rows: packed.
        version: of the weights.

    Raises:
        ConfigError: the objective gave another shape, or no numbers.
    """
    torch = sys.modules.get("torch")
    with nullcontext() if torch is None else torch.no_grad():
        given = objective.packed_log_probs(state, rows)
    return given, _mismatch(rows, given, version, objective.importance)


def _mismatch(
    rows: Packed,
    given: Any,
    version: int,
    importance: float | tuple[float, float] | None,
) -> dict[str, float]:
    """How far the loop's weights are from what sampled; nothing when no token takes loss.

    Raises:
        ConfigError: the objective gave another shape, or no numbers.
    """
    values = given.detach().float().cpu().numpy() if hasattr(given, "detach") else given
    scores = np.asarray(values, dtype=np.float32)
    mask = rows["response_mask"]
    if scores.shape != mask.shape or not np.isfinite(scores[mask]).all():
        raise ConfigError(
            f"objective.packed_log_probs gave {list(scores.shape)}; it must give a finite "
            f"log-probability for each id under response_mask, {list(mask.shape)}"
        )
    if not mask.any():
        return {}
    import torch

    from trainer.mismatch import log_ratio, of_tokens

    drift = log_ratio(
        torch.from_numpy(scores[mask]), torch.from_numpy(rows["behavior_logprobs"][mask])
    )
    on_policy = torch.from_numpy(rows["versions"][mask] == version)
    return of_tokens(drift, on_policy, importance)
