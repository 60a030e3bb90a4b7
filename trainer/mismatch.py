"""How far the sampler's policy and the trainer's are apart: importance weights and their statistics.

The mismatch of a step is that of its proximal policy (the trainer's weights before the update)
against behaviour. At lag 0 with the same numerics it is noise; `mismatch/k3` above 1e-3 there means
a bug: another temperature, another chat template, a lost kept set, or an index off by one.
"""

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(numerator / denominator) from log-probabilities, clamped to ±LOG_RATIO_LIMIT."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_weight(drift: Tensor, importance: float | tuple[float, float] | None) -> Tensor:
    """Weight of each token from its log ratio: capped, 0 outside a band (inclusive), or 1."""
    if importance is None:
        return torch.ones_like(drift)
    ratio = torch.exp(drift)
    if isinstance(importance, tuple):
        low, high = importance
        return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return ratio.clamp(max=importance)


def mismatch(
    drift: Tensor, mask: Tensor, importance: float | tuple[float, float] | None
) -> dict[str, Tensor]:
    """Statistics over the masked-in tokens; all 0 (ess 1) when there are none.

    Args:
        drift: `log_ratio(proximal, behavior)`.
        mask: tokens that count.
        importance: as in `policy_loss`; the weights of `ess` and `behavior_importance_mean` are
            those the loss applies, everything else uses the uncapped ratio.

    Returns:
        `mismatch/` `kl` = mean(b - p), `k3` = mean(e^(p-b) - (p-b) - 1), `ess` = the effective
        share of tokens (Kish), `corrected` = share of tokens capped or out of the band,
        `behavior_importance_mean`, `max` = max |p - b|, `chi2_token`, `kl_sample_train_v2`.
    """
    d = drift.detach()[mask]
    if d.numel() == 0:
        d = drift.new_zeros(1)
    ratio = torch.exp(d)
    w = importance_weight(d, importance)
    if isinstance(importance, tuple):
        corrected = (w == 0).to(d.dtype).mean()
    elif importance is not None:
        corrected = (ratio > importance).to(d.dtype).mean()
    else:
        corrected = d.new_zeros(())
    square = w.square().mean()
    return {
        "mismatch/kl": -d.mean(),
        "mismatch/k3": (torch.expm1(d) - d).mean(),
        "mismatch/ess": torch.where(square > 0, w.mean().square() / square, 0.0),
        "mismatch/corrected": corrected,
        "mismatch/behavior_importance_mean": w.mean(),
        "mismatch/max": d.abs().max(),
        "mismatch/chi2_token": torch.exp(2 * d).mean() - 1,
        "mismatch/kl_sample_train_v2": d.square().mean() / 2,
    }


def of_tokens(
    drift: Tensor, on_policy: Tensor, importance: float | tuple[float, float] | None
) -> dict[str, float]:
    """The mismatch of a step's tokens, and apart from it that of the on-policy ones.

    `drift/mean` (nats) and `drift/tokens` are the tokens that the very weights now scored had
    sampled: there trainer and engine must agree.

    Args:
        drift: `log_ratio(proximal, behavior)` of the tokens that take loss.
        on_policy: which of them are of the trainer's own version.
        importance: as in `mismatch`.
    """
    told = mismatch(drift, torch.ones_like(on_policy), importance)
    if bool(on_policy.any()):
        told["drift/mean"] = drift[on_policy].abs().mean()
        told["drift/tokens"] = on_policy.sum()
    return {name: float(value) for name, value in told.items()}
