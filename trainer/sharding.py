"""FSDP2: the weights of a policy divided among the ranks, with their gradients and moments.

Of every tensor each rank holds a slice of its first dimension (`torch.chunk` order). A layer is
gathered just before it is used and let go of right after, forward and backward; its gradients are
added up over the ranks as they arrive, each rank keeping those of its slice. What is gathered
outside of that, for digests, files and engines, is gathered one tensor at a time (`whole`).

Two rules follow for whoever runs a sharded network:

- whatever touches its weights runs inside the module that was sharded, where they are whole;
- every forward and every backward is a collective: all ranks make equally many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, slots=True)
class Slice:
    """Which part of every tensor something is about; by default the whole."""

    part: int = 0
    parts: int = 1

    def rows(self, length: int) -> range:
        """Its rows of a tensor with so many: `torch.chunk`, the last parts may be empty."""
        size = -(-length // self.parts)
        start = min(self.part * size, length)
        return range(start, min(start + size, length))


WHOLE = Slice()


def shard(root: nn.Module, device: torch.device, ranks: int) -> None:
    """Divide the parameters below `root` among all ranks, and move them to the device.

    What is gathered together is what activation checkpointing recomputes together: a layer. The
    rest, embeddings and head, is the root's.

    Args:
        root: the module that everything will run inside of.
        device: the slices' place; the whole need never fit there.
        ranks: processes in the default group.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    narrow = any(p.dtype.itemsize < 4 for p in root.parameters())
    # Sums over the ranks are never made in the precision of narrow weights.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    layers = [m for m in root.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, root):
        # The root lets go of its weights too: what stayed gathered would miss the next update.
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        # The loss is divided by the mass of all ranks: gradients are added up, not averaged.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # An expert that no row of this rank was routed to takes part with zeros.
        sharded.set_reduce_scatter_unused_params(True, recurse=False)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing its memory; all of it if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank. A collective if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
