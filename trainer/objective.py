"""The loss: decoupled PPO, CISPO or GSPO over packed rows, with its metrics.

Log-probabilities of the same sampled id, `[rows, width]`, aligned on the id they score:

    b  behavior   the sampler's, at sampling time
    p  proximal   the trainer's weights, rescored before the step's first update (no gradient)
    c  current    inside the update (gradient)

    ppo    w * max(-A r, -A clip(r, 1 - el, 1 + eh)), and at most w * -A * dual_clip where A < 0
    cispo  w * -sg(clip(r, 1 - el, 1 + eh)) * A * c                     arXiv:2506.13585
    gspo   ppo without dual clip on r = sg(s) e^(c - sg(c)),
           s = exp(mean of c - p over the chain)                        arXiv:2507.18071

with r = e^(c-p), w = sg(min(e^(p-b), cap)) (truncated importance sampling) or e^(p-b) inside a band
and 0 outside (IcePop), sg = stop gradient; decoupled: arXiv:2505.24298, dual clip: arXiv:1912.09729.
Cap and band change the weight only; a sequence mask takes whole chains out of numerator and
denominator. Log ratios are clamped to ±20 (gspo: s to e^10).

A loss is a weighted sum over the mask divided by its *mass*. Micro-batches and processes pass the
mass of all of them together as `normaliser`; their losses then add up to the loss of the whole.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.mismatch import importance_weight, log_ratio, mismatch

Kind = Literal["ppo", "cispo", "gspo"]
Aggregation = Literal["token-mean", "rollout-mean"]
KLKind = Literal["k1", "k2", "k3"]
Importance = float | tuple[float, float] | None

GSPO_LOG_LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """Divergence from a frozen reference, added with the mask and weights of the loss.

    Estimators after Schulman (joschu.net/blog/kl-approx.html): with d = reference - current,
    k1 = -d, k2 = d²/2, k3 = e^d - d - 1.
    """

    reference: Tensor
    """Log-probabilities under the reference, over the whole vocabulary."""
    coefficient: float
    kind: KLKind = "k3"
    current: Tensor | None = None
    """Current log-probabilities over the whole vocabulary, when sampling was filtered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy:
    """Entropy of the next-token distributions: a metric, and with a coefficient a bonus."""

    values: Tensor
    """Nats, over the whole vocabulary at the sampling temperature."""
    coefficient: float = 0.0


def policy_loss(
    current: Tensor,
    proximal: Tensor | None,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "ppo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    dual_clip: float | None = 3.0,
    importance: Importance = None,
    aggregation: Aggregation = "token-mean",
    weights: Tensor | None = None,
    segment_ids: Tensor | None = None,
    sequence_mask: tuple[float, float] | None = None,
    kl: KL | None = None,
    entropy: Entropy | None = None,
    normaliser: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some packed rows and its metrics (see the module docstring).

    Args:
        current: log-probabilities inside the update. All tensors are `[rows, width]`.
        proximal: those before the step's first update. None: the ratio is taken against `behavior`
            itself; then a cap would correct twice and is refused, and a band only masks.
        behavior: the sampler's.
        advantages: per token.
        mask: sampled ids that take loss. Whatever stands elsewhere is ignored, NaN included.
        kind: surrogate.
        epsilon_low: lower clip, 1 - epsilon_low.
        epsilon_high: upper clip, 1 + epsilon_high.
        dual_clip: bound of the ratio where A < 0 (`ppo`); None is off.
        importance: cap, band (low, high), or no weight.
        aggregation: `token-mean`, or `rollout-mean`: the mean over rollouts of token means. `gspo`
            takes the mean over chains of token means, or over rollouts with `rollout-mean`.
        weights: `rollout_weights` of `pack`, for `rollout-mean`.
        segment_ids: chains of each row, for `gspo` and `sequence_mask`.
        sequence_mask: (low, high): chains whose geometric mean of e^(p-b) lies outside are left out.
        kl: divergence from a reference.
        entropy: metric and bonus.
        normaliser: mass to divide by, see `loss_mass`; default: the mass of these rows.

    Returns:
        The scalar loss (0, with a graph, when nothing is left) and detached scalars. `mass` is the
        mass of these rows; `pg, pg_clipfrac, pg_clipfrac_lower, ppo_kl, entropy, kl` are means over
        it, so that those of several parts pool by mass (`pool_metrics`); `mismatch/*` are plain
        token means over the mask, before any rejection.

    Raises:
        ValueError: shapes that differ, a setting out of range, or a missing argument.
    """
    _check_settings(kind, epsilon_low, epsilon_high, dual_clip, importance, aggregation)
    mask = mask.to(torch.bool)
    for name, tensor in (
        ("proximal", proximal),
        ("behavior", behavior),
        ("advantages", advantages),
    ):
        if tensor is not None and tensor.shape != current.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, current {tuple(current.shape)}; both must "
                "be [rows, width]"
            )
    c, b, advantage = (torch.where(mask, x, 0.0) for x in (current, behavior.detach(), advantages))
    if proximal is None:
        if isinstance(importance, (int, float)):
            raise ValueError(
                f"importance = {importance} caps proximal over behaviour, but no proximal "
                "log-probabilities are given and the ratio against behaviour corrects already; "
                "rescore them, or use a band"
            )
        p, drift = b, log_ratio(c.detach(), b)
        w = (importance_weight(drift, importance) > 0).to(c.dtype)
    else:
        p = torch.where(mask, proximal.detach(), 0.0)
        drift = log_ratio(p, b)
        w = importance_weight(drift, importance)
    share = _share(drift, mask, kind, aggregation, weights, segment_ids, sequence_mask)
    mass = share.sum()
    scale = share / _nonzero(mass)

    if kind == "gspo":
        ratio = _sequence_ratio(c, p, mask, segment_ids)
    else:
        ratio = torch.exp(log_ratio(c, p))
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    if kind == "cispo":
        plain = surrogate = -clipped.detach() * advantage * c
        clip_hit = ratio.detach() != clipped.detach()
    else:
        plain = -advantage * ratio
        surrogate = torch.maximum(plain, -advantage * clipped)
        clip_hit = surrogate > plain
    lower_hit = torch.zeros_like(mask)
    if kind == "ppo" and dual_clip is not None:
        bound = -advantage * dual_clip
        lower_hit = (advantage < 0) & (surrogate > bound)
        surrogate = torch.where(lower_hit, bound, surrogate)
    terms = w * surrogate

    metrics = {
        "mass": mass,
        "pg": (scale * terms).sum(),
        "pg_clipfrac": (scale * clip_hit).sum(),
        "pg_clipfrac_lower": (scale * lower_hit).sum(),
        "ppo_kl": (scale * (p - c)).sum(),
    }
    if kl is not None:
        full = current if kl.current is None else kl.current
        d = torch.where(mask, kl.reference.detach() - full, 0.0)
        divergence = _divergence(d, kl.kind)
        metrics["kl"] = (scale * divergence).sum()
        terms = terms + kl.coefficient * divergence
    if entropy is not None:
        spread = torch.where(mask, entropy.values, 0.0)
        metrics["entropy"] = (scale * spread).sum()
        if entropy.coefficient:
            terms = terms - entropy.coefficient * spread
    divisor = mass if normaliser is None else torch.as_tensor(normaliser, device=mass.device)
    loss = (share * terms).sum() / _nonzero(divisor.to(share.dtype))
    metrics |= mismatch(drift, mask, importance)
    return loss, {name: value.detach() for name, value in metrics.items()}


def loss_mass(
    proximal: Tensor,
    behavior: Tensor,
    mask: Tensor,
    *,
    kind: Kind = "ppo",
    aggregation: Aggregation = "token-mean",
    weights: Tensor | None = None,
    segment_ids: Tensor | None = None,
    sequence_mask: tuple[float, float] | None = None,
) -> Tensor:
    """What `policy_loss` divides by: tokens, rollouts or chains that are left in the loss.

    Sum it over all micro-batches and processes of an update and pass the sum as `normaliser`. A sum
    of 0 means that no token is left: no optimizer update.
    """
    mask = mask.to(torch.bool)
    p, b = (torch.where(mask, x.detach(), 0.0) for x in (proximal, behavior))
    drift = log_ratio(p, b)
    return _share(drift, mask, kind, aggregation, weights, segment_ids, sequence_mask).sum()


def usable_gradient(
    packed: Mapping[str, NDArray[np.generic]], kl: float = 0.0, entropy: float = 0.0
) -> bool:
    """Whether a step may change the weights: some token takes loss, and it has something to say.

    Args:
        packed: rows of `pack`.
        kl: coefficient of the KL term.
        entropy: coefficient of the entropy bonus.
    """
    mask = packed["response_mask"]
    if kl or entropy:
        return bool(mask.any())
    return bool((packed["advantages"][mask] != 0).any())


def pool_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Metrics of `policy_loss` over several parts: means by mass, `mass` itself summed.

    The `mismatch/*` entries are left out: compute them once, over the whole step.
    """
    total = 0.0
    sums: dict[str, float] = {}
    for part in parts:
        mass = float(part["mass"])
        total += mass
        for name, value in part.items():
            if name != "mass" and not name.startswith("mismatch/"):
                sums[name] = sums.get(name, 0.0) + mass * float(value)
    return {"mass": total} | {name: value / (total or 1.0) for name, value in sums.items()}


def _share(
    drift: Tensor,
    mask: Tensor,
    kind: Kind,
    aggregation: Aggregation,
    weights: Tensor | None,
    segment_ids: Tensor | None,
    sequence_mask: tuple[float, float] | None,
) -> Tensor:
    """How much each token counts in the numerator; its sum is the mass."""
    if (kind == "gspo" or sequence_mask is not None) and segment_ids is None:
        raise ValueError("gspo and sequence_mask work on chains: pass segment_ids of pack")
    if aggregation == "rollout-mean":
        if weights is None:
            raise ValueError("aggregation 'rollout-mean' needs weights: rollout_weights of pack")
        share = torch.where(mask, weights.to(drift.dtype), 0.0)
    elif kind == "gspo" and segment_ids is not None:
        tokens = _per_chain(mask.to(drift.dtype), segment_ids)
        share = torch.where(mask, 1 / tokens.clamp(min=1), 0.0)
    else:
        share = mask.to(drift.dtype)
    if sequence_mask is not None and segment_ids is not None:
        low, high = sequence_mask
        if not 0 < low < high:
            raise ValueError(f"sequence_mask = {sequence_mask} must rise: 0 < low < high")
        tokens = _per_chain(mask.to(drift.dtype), segment_ids).clamp(min=1)
        geometric = torch.exp(_per_chain(drift * mask, segment_ids) / tokens)
        share = share * ((geometric >= low) & (geometric <= high))
    return share


def _per_chain(values: Tensor, segment_ids: Tensor) -> Tensor:
    """The sum of `values` over the chain of each token, at that token."""
    chains = segment_ids.long()
    sums = values.new_zeros((len(values), int(chains.max()) + 1 if chains.numel() else 1))
    return sums.scatter_add(1, chains, values).gather(1, chains)


def _sequence_ratio(c: Tensor, p: Tensor, mask: Tensor, segment_ids: Tensor | None) -> Tensor:
    assert segment_ids is not None
    tokens = _per_chain(mask.to(c.dtype), segment_ids).clamp(min=1)
    mean = _per_chain((c.detach() - p) * mask, segment_ids) / tokens
    return torch.exp((c - c.detach() + mean).clamp(max=GSPO_LOG_LIMIT))


def _divergence(d: Tensor, kind: KLKind) -> Tensor:
    match kind:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(-20.0, 20.0)
            return torch.exp(d) - d - 1
    raise ValueError(f"kl {kind!r} is unknown; choose one of {', '.join(get_args(KLKind))}")


def _nonzero(mass: Tensor) -> Tensor:
    return torch.where(mass > 0, mass, torch.ones_like(mass))


def _check_settings(
    kind: Kind,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None,
    importance: Importance,
    aggregation: Aggregation,
) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"loss {kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
    if aggregation not in get_args(Aggregation):
        raise ValueError(
            f"aggregation {aggregation!r} is unknown; choose one of "
            f"{', '.join(get_args(Aggregation))}"
        )
    if epsilon_low < 0 or epsilon_high < 0:
        raise ValueError(
            f"epsilon_low = {epsilon_low}, epsilon_high = {epsilon_high}: must be >= 0"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip = {dual_clip} must be above 1, or None for off")
    if isinstance(importance, tuple):
        if not 0 <= importance[0] < importance[1]:
            raise ValueError(f"importance = {importance} is no band; write (low, high)")
    elif importance is not None and not importance > 0:
        raise ValueError(f"importance = {importance} must be a positive cap")
