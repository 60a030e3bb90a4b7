"""From logits to ids: temperature, filters, one uniform number per token.

Order of the filters, as in vLLM: temperature, min-p, top-k, top-p. The log-probability of a sampled
id is that of the distribution it was drawn from, after temperature and filters, in float32.

An id is drawn by inverting the cumulative distribution at one uniform number. Each request has its
own stream of them, so what it samples depends on its seed and its logits, never on who shares the
batch.

Shapes: B requests, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError
from torch import Tensor

BLOCK = 64


class SamplingParams(BaseModel):
    """`sampling_params` of a request. A field that is not listed here is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: Annotated[StrictInt, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 takes the likeliest id: log-probability 0, kept set of one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=-1)] = -1
    """-1 and 0 keep all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep ids with at least this share of the likeliest id's probability."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] | None = None
    stop_token_ids: tuple[Annotated[StrictInt, Field(ge=0)], ...] = ()
    ignore_eos: StrictBool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = 0
    """Only the sampled id's own log-probability is reported."""
    n: Annotated[StrictInt, Field(ge=1, le=1)] = 1

    @property
    def filtered(self) -> bool:
        """Whether part of the distribution is cut off, so that kept sets are reported."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Validate a JSON object.

        Raises:
            ValueError: names each field, its value and what is allowed.
        """
        if not isinstance(value, dict):
            raise ValueError("sampling_params must be an object")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = [
                f"sampling_params.{'.'.join(map(str, p['loc']))} = {p['input']!r}: {p['msg']}"
                for p in error.errors()
            ]
            raise ValueError("; ".join(problems)) from error


class Uniforms:
    """A request's own stream of numbers in [0, 1), drawn in blocks."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.Generator(np.random.Philox(seed))
        self._block: list[float] = []

    def next(self) -> float:
        """The next number of the stream."""
        if not self._block:
            self._block = self._source.random(BLOCK)[::-1].tolist()
        return self._block.pop()


@dataclass(frozen=True, slots=True)
class Settings:
    """The sampling settings of a batch as tensors. Built when its membership changes."""

    temperature_B1: Tensor
    greedy: tuple[int, ...]
    filtered: tuple[int, ...]
    min_p_F1: Tensor
    top_k_F1: Tensor
    top_p_F1: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Self:
        """Settings of these requests, in this order."""
        cut = [i for i, p in enumerate(params) if p.filtered and p.temperature > 0]
        chosen = [params[i] for i in cut]
        return cls(
            temperature_B1=torch.tensor([[p.temperature or 1.0] for p in params]),
            greedy=tuple(i for i, p in enumerate(params) if p.temperature == 0),
            filtered=tuple(cut),
            min_p_F1=torch.tensor([[p.min_p] for p in chosen]),
            top_k_F1=torch.tensor([[p.top_k if p.top_k > 0 else 2**31] for p in chosen]),
            top_p_F1=torch.tensor([[p.top_p] for p in chosen]),
        )


def kept(scaled_FV: Tensor, settings: Settings) -> Tensor:
    """Which ids survive min-p, top-k and top-p; at least the likeliest one does.

    Args:
        scaled_FV: logits over temperature of the filtered requests.
        settings: their thresholds, row by row.
    """
    top_F1 = scaled_FV.max(dim=-1, keepdim=True).values
    floor_F1 = top_F1 + settings.min_p_F1.log()  # log 0 = -inf keeps all
    left_FV = scaled_FV.masked_fill(scaled_FV < floor_F1, -torch.inf)
    ordered_FV, index_FV = left_FV.sort(dim=-1, stable=True)
    # Never more than k, also among ids that tie with the k-th (the highest of those stay): a row has
    # room for top_k ids a token, and one that overflowed could not train.
    rank_V = torch.arange(ordered_FV.shape[-1], 0, -1, device=ordered_FV.device)
    ordered_FV = ordered_FV.masked_fill(rank_V > settings.top_k_F1, -torch.inf)
    mass_FV = ordered_FV.softmax(dim=-1).cumsum(dim=-1)
    cut_FV = mass_FV <= 1 - settings.top_p_F1
    cut_FV[:, -1] = False
    cut_FV |= ordered_FV == -torch.inf
    return torch.empty_like(cut_FV).scatter_(-1, index_FV, ~cut_FV)


def draw(
    logits_BV: Tensor, settings: Settings, uniforms_B: Sequence[float]
) -> tuple[list[int], list[float], dict[int, list[int]]]:
    """Sample one id per row.

    Returns:
        ids, their log-probabilities (NaN or infinite if the logits were), and per filtered row the
        ids that were kept.
    """
    scaled_BV = logits_BV.float() / settings.temperature_B1
    supports: dict[int, list[int]] = {}
    if settings.filtered:
        rows = list(settings.filtered)
        keep_FV = kept(scaled_BV[rows], settings)
        scaled_BV[rows] = scaled_BV[rows].masked_fill(~keep_FV, -torch.inf)
        supports = {
            row: keep.nonzero().flatten().tolist() for row, keep in zip(rows, keep_FV, strict=True)
        }
    for row in settings.greedy:
        best = int(scaled_BV[row].argmax())
        if bool(scaled_BV[row].isfinite().all()):
            scaled_BV[row] = torch.full_like(scaled_BV[row], -torch.inf)
            scaled_BV[row, best] = 0.0
        supports[row] = [best]
    logp_BV = scaled_BV.log_softmax(dim=-1)
    # float64: in float32 the running sum over a large vocabulary loses the tail.
    mass_BV = logp_BV.double().exp_().cumsum(dim=-1)
    at_B1 = torch.tensor(uniforms_B, dtype=torch.float64)[:, None] * mass_BV[:, -1:]
    # The first id whose running sum exceeds the number: an id of probability 0 is never drawn.
    ids_B1 = torch.searchsorted(mass_BV, at_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return (
        ids_B1.flatten().tolist(),
        logp_BV.gather(-1, ids_B1).flatten().tolist(),
        supports,
    )
