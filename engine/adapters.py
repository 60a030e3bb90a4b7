"""A LoRA adapter merged into the weights it changes: to the built-in engine, a version like any other."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.refusals import BadWeights

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def merge(
    name: str,
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    described: Mapping[str, Any],
) -> dict[str, Tensor]:
    """The base weights with `alpha / rank * B A` added where the adapter has factors.

    Args:
        name: the policy, for messages.
        base: the model's own weights.
        adapter: factors by the names peft gives them.
        described: `rank`, `alpha`, and whether weights are `transposed` (inputs x outputs).

    Raises:
        BadWeights: a factor lacks its other half, or its layer.
    """
    merged = dict(base)
    scale = float(described["alpha"]) / int(described["rank"])
    halves = {key for key in adapter if key.endswith(_A)}
    paired = halves | {key.removesuffix(_A) + _B for key in halves}
    if odd := sorted(adapter.keys() ^ paired):
        raise BadWeights(f"policy {name}: {odd[0]} is no pair of LoRA factors")
    for key in sorted(halves):
        layer = key.removeprefix(_PREFIX).removesuffix(_A) + ".weight"
        weight = base.get(layer)
        change = adapter[key.removesuffix(_A) + _B].float() @ adapter[key].float() * scale
        if described["transposed"]:
            change = change.T
        if weight is None or weight.shape != change.shape:
            found = None if weight is None else tuple(weight.shape)
            raise BadWeights(
                f"policy {name}: {key} changes {layer} by {tuple(change.shape)}, the base has {found}"
            )
        merged[layer] = (weight.float() + change).to(weight.dtype)
    return merged
