"""Which device a trainer process computes on, and what carries its collectives.

A process that stands alone takes the first GPU there is; of several on a machine each takes its own.
Tensors on a GPU travel over NCCL, and whatever is said between the ranks (`trainer.ranks`) is made of
CPU tensors, which travel over gloo on every machine.
"""

from dataclasses import dataclass

import torch

from domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank computes."""

    device: torch.device
    backend: str
    """Of the process group: which library carries tensors of which device."""

    @property
    def bound(self) -> torch.device | None:
        """The device that the process group is bound to, as `device_id`; gloo is bound to none."""
        return self.device if self.device.type == "cuda" else None


def place(local_rank: int, gpus: int) -> Place:
    """The place of a machine's n-th rank.

    Args:
        local_rank: n, from 0.
        gpus: how many this process sees.

    Raises:
        ConfigError: there are GPUs, and fewer than ranks; two ranks cannot share one under NCCL.
    """
    if not gpus:
        return Place(torch.device("cpu"), "gloo")
    if local_rank >= gpus:
        raise ConfigError(
            f"trainer process {local_rank + 1} of this machine has no GPU: there are {gpus}, and each "
            "process needs its own; start fewer here (trainer.ranks), or set CUDA_VISIBLE_DEVICES= "
            "(empty) to train on CPUs"
        )
    return Place(torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl")


def current() -> torch.device:
    """The device of this process, which `trainer.ranks` has chosen if it is one of several."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
