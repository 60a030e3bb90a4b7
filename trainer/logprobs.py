"""Log-probabilities of packed ids, in chunks of tokens so that a big vocabulary fits.

Logits at column t - 1 predict the id at column t; results are aligned on the id they score ("onto
ids") and 0 in column 0. Where sampling was filtered, the distribution is renormalised over the kept
ids that the sampler recorded (`support_ids`, `support_columns` of `pack`): a set recomputed here
could lose the sampled id, and the whole vocabulary would bias every ratio by the mass that was cut.

Legend of shape suffixes: R rows, W width, H hidden, V vocabulary, N scored ids (flattened), E kept
ids (flattened).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Scores:
    """What a forward pass says about the ids of `[rows, width]`."""

    log_probs: Tensor
    """On the kept set where there is one: comparable with the sampler's."""
    full: Tensor
    """Over the whole vocabulary: for the KL to a reference. The same tensor when nothing was
    filtered."""
    entropy: Tensor | None
    """Nats over the whole vocabulary at the temperature, if asked for."""


def next_token_log_probs(
    logits: Tensor,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    support_ids: Tensor | None = None,
    support_columns: Tensor | None = None,
) -> Tensor:
    """Log-probability of each id given the columns before it, `[rows, width]`.

    Args:
        logits: `[rows, width, vocabulary]`; column t predicts column t + 1.
        input_ids: `[rows, width]`.
        temperature: of the sampler.
        support_ids: `[rows, capacity]` kept ids, -1 padded.
        support_columns: `[rows, capacity]` columns of the sampled ids they belong to.
    """
    return score(
        logits,
        lambda chosen: chosen,
        input_ids,
        temperature=temperature,
        support_ids=support_ids,
        support_columns=support_columns,
        chunk=logits.shape[0] * logits.shape[1],
    ).log_probs


def score(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    support_ids: Tensor | None = None,
    support_columns: Tensor | None = None,
    entropy: bool = False,
    chunk: int = CHUNK,
) -> Scores:
    """Score packed ids without ever holding the logits of more than `chunk` of them.

    The backward pass computes each chunk's logits again.

    Args:
        hidden: `[rows, width, hidden]`, what `head` turns into logits.
        head: `[n, hidden]` to `[n, vocabulary]`.
        input_ids: `[rows, width]`.
        mask: ids to score; elsewhere the result is 0 and no logits are computed. Default: all.
        temperature: of the sampler.
        support_ids: `[rows, capacity]` kept ids, -1 padded.
        support_columns: `[rows, capacity]` columns of the sampled ids they belong to.
        entropy: whether to compute it.
        chunk: ids scored together.

    Raises:
        ValueError: a temperature that is not positive: greedy choices have no probabilities.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be positive to train on its samples")
    wanted = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool().clone()
    wanted[:, :1] = False
    rows, columns = wanted.nonzero(as_tuple=True)
    context_NH = hidden[rows, columns - 1]
    target_N = input_ids[rows, columns].long()
    owner_E, kept_E = _entries(wanted, support_ids, support_columns)
    parts: list[tuple[Tensor, ...]] = []
    # At least one, be it empty: the head must see a backward pass on every rank.
    for start in range(0, max(1, len(target_N)), chunk):
        stop = min(start + chunk, len(target_N))
        first, last = torch.searchsorted(
            owner_E, torch.tensor([start, stop], device=owner_E.device)
        )
        arguments = (
            context_NH[start:stop],
            target_N[start:stop],
            owner_E[first:last] - start,
            kept_E[first:last],
            temperature,
            entropy,
            head,
        )
        if len(target_N) > chunk and torch.is_grad_enabled():
            parts.append(checkpoint(_score_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_score_chunk(*arguments))

    def place(which: int) -> Tensor:
        result = torch.zeros(input_ids.shape, dtype=torch.float32, device=hidden.device)
        values = torch.cat([part[which] for part in parts])
        return result.to(values.dtype).index_put((rows, columns), values)

    full = place(0)
    return Scores(
        log_probs=place(1) if len(owner_E) else full,
        full=full,
        entropy=place(2) if entropy else None,
    )


def support_log_probs(
    logits_NV: Tensor, target_N: Tensor, owner_E: Tensor, kept_E: Tensor
) -> Tensor:
    """Log-softmax of each target over its kept ids, of which it must have one at least.

    Args:
        logits_NV: already divided by the temperature.
        target_N: sampled ids.
        owner_E: which target each kept id belongs to.
        kept_E: kept ids.
    """
    kept_logits_E = logits_NV[owner_E, kept_E]
    peak_N = torch.full_like(logits_NV[:, 0], -torch.inf)
    peak_N = peak_N.scatter_reduce(0, owner_E, kept_logits_E.detach(), "amax")
    mass_N = torch.zeros_like(peak_N).index_add(
        0, owner_E, torch.exp(kept_logits_E - peak_N[owner_E])
    )
    chosen_N = logits_NV.gather(1, target_N[:, None]).squeeze(1)
    return chosen_N - peak_N - torch.log(mass_N)


def _score_chunk(
    context_NH: Tensor,
    target_N: Tensor,
    owner_E: Tensor,
    kept_E: Tensor,
    temperature: float,
    entropy: bool,
    head: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """(full, on the kept set, entropy) of some ids."""
    logits_NV = head(context_NH)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    logits_NV = logits_NV / temperature
    total_N = torch.logsumexp(logits_NV, dim=-1)
    full_N = logits_NV.gather(1, target_N[:, None]).squeeze(1) - total_N
    result = [full_N, full_N]
    if len(owner_E):
        filtered = torch.zeros_like(target_N, dtype=torch.bool)
        filtered[owner_E] = True
        at = filtered.nonzero().squeeze(1)
        rank = torch.cumsum(filtered, 0) - 1
        on_support = support_log_probs(logits_NV[at], target_N[at], rank[owner_E], kept_E)
        result[1] = full_N.index_put((at,), on_support)
    if entropy:
        log_p = logits_NV - total_N[:, None]
        # A token that the model rules out (-inf) adds nothing, and must not make nan.
        log_p = torch.where(log_p == -torch.inf, 0.0, log_p)
        result.append(-(torch.softmax(logits_NV, dim=-1) * log_p).sum(-1))
    return tuple(result)


def _entries(
    wanted: Tensor, support_ids: Tensor | None, support_columns: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(number of the scored id, kept id) of each entry, sorted by the former."""
    if support_ids is None or support_columns is None:
        nothing = torch.zeros(0, dtype=torch.long, device=wanted.device)
        return nothing, nothing
    rows, slots = (support_columns >= 0).nonzero(as_tuple=True)
    columns = support_columns[rows, slots].long()
    number = torch.cumsum(wanted.flatten(), 0).reshape(wanted.shape) - 1
    used = wanted[rows, columns]
    owner, kept = number[rows, columns][used], support_ids[rows, slots].long()[used]
    order = torch.argsort(owner, stable=True)
    return owner[order], kept[order]
