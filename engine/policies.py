"""A resident policy: a transformers model with its limits, and the masked forward over slots.

The forward hands transformers a ready 4-D mask, explicit positions and the slots as its cache, which
most decoder architectures accept. What does not (state-space layers, position biases made from a
2-D mask) shows in `check_cached_generation` and is refused before it serves anything.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from engine.refusals import Unsupported
from engine.slots import KVShape, Slots

LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """One version of one run's model."""

    name: str
    """`run@version`."""
    run: str
    version: int
    sha256: str
    model: Any
    """A transformers causal language model in eval mode."""
    shape: KVShape
    eos: frozenset[int]
    vocabulary: int
    positions: int
    """Longest prompt plus answer, in tokens."""

    @torch.inference_mode()
    def forward(
        self, slots: Slots, first: int, ids_BQ: Tensor, starts_B: Tensor, keep_K: Tensor | int
    ) -> Tensor:
        """Extend the slots from `first` on by ids at columns starts_B, starts_B + 1, ….

        Args:
            slots: room for the longest row must be there.
            first: slot of row 0.
            ids_BQ: new ids; short rows are padded on the right with anything.
            starts_B: ids already in each slot.
            keep_K: columns of ids_BQ whose logits are wanted (all rows alike), or 1 for the last.

        Returns:
            Logits [B, K, V].
        """
        count, width = ids_BQ.shape
        at_BQ = starts_B[:, None] + torch.arange(width)
        columns = int(at_BQ[:, -1].max()) + 1
        slots.window(first, first + count, at_BQ, columns)
        logits: Tensor = self.model(
            input_ids=ids_BQ,
            attention_mask=self._mask(at_BQ, columns),
            position_ids=at_BQ.clamp(max=self.positions - 1),
            past_key_values=slots,
            use_cache=True,
            logits_to_keep=keep_K,
        ).logits
        return logits

    @torch.inference_mode()
    def score(self, ids: list[int]) -> Tensor:
        """Log-probabilities of ids[1:] given what stands before each: one plain forward, no cache."""
        logits_TV = self.model(torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        found: Tensor = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        return found

    def _mask(self, at_BQ: Tensor, columns: int) -> Tensor | dict[str, Tensor]:
        config = self.model.config
        column_C = torch.arange(columns)
        full_B1QC: Tensor = (column_C <= at_BQ[..., None])[:, None]
        types = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if window is None or types == {"full_attention"}:
            return self._additive(full_B1QC)
        near_B1QC: Tensor = full_B1QC & (column_C > at_BQ[..., None] - window)[:, None]
        if types == LAYER_TYPES:
            return {
                "full_attention": self._additive(full_B1QC),
                "sliding_attention": self._additive(near_B1QC),
            }
        return self._additive(near_B1QC)

    def _additive(self, seen_B1QC: Tensor) -> Tensor:
        """As the attention wants it: eager attention adds the mask, so True would let all through."""
        if self.model.config._attn_implementation != "eager":
            return seen_B1QC
        dtype = self.shape.dtype
        return torch.zeros_like(seen_B1QC, dtype=dtype).masked_fill_(
            ~seen_B1QC, torch.finfo(dtype).min
        )


@torch.inference_mode()
def kv_shape(model: Any) -> KVShape:
    """Size of the model's KV, read off a forward of one token.

    Raises:
        Unsupported: its state is not one pair of equal tensors per layer.
    """
    kind = type(model).__name__
    types = set(getattr(model.config, "layer_types", None) or ())
    if types - LAYER_TYPES:
        raise Unsupported(
            f"{kind} has layers of type {sorted(types - LAYER_TYPES)}, whose state the built-in "
            "engine cannot batch; serve it with vLLM"
        )
    cache = DynamicCache()
    try:
        model(torch.tensor([[0]]), past_key_values=cache, use_cache=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise Unsupported(
            f"{kind} does not run with a plain key-value cache ({error}); serve it with vLLM"
        ) from error
    found = {
        (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        for layer in cache.layers
        if isinstance(keys := getattr(layer, "keys", None), Tensor)
        and isinstance(values := getattr(layer, "values", None), Tensor)
    }
    if len(found) != 1:
        raise Unsupported(
            f"{kind} keeps {len(found)} kinds of keys and values, the built-in engine needs one; "
            "serve it with vLLM"
        )
    heads, key_dim, value_dim, dtype = found.pop()
    return KVShape(len(cache.layers), heads, key_dim, value_dim, dtype)
