"""What makes two executions of a step bit-equal: kernels, threads, generators.

Weight digests depend on the thread count, the device and the torch build. `World` records them at
run creation; a resumed run takes its thread count from there, and names what else has changed if a
replay does not reproduce a digest.
"""

import os
import platform
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
import transformers

from domain.ids import fold
from trainer import devices


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything besides code and data that weight digests depend on."""

    threads: int
    device: str
    torch_version: str
    transformers_version: str
    machine: str
    shares: int = 1

    @classmethod
    def here(cls, threads: int, device: torch.device, *, shares: int = 1) -> Self:
        """The world of this process, which is one of `shares`."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return cls(
            threads=threads,
            device=name,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            machine=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            shares=shares,
        )

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> Self:
        """The world in a run's record; other keys of the record are ignored."""
        return cls(**{f.name: recorded[f.name] for f in fields(cls) if f.name in recorded})

    def differences(self, other: Self) -> str:
        """What differs, as text for a message; empty when nothing does."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {mine[name]!r} -> {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )


def settle(threads: int, *, exact: bool) -> torch.device:
    """Fix the thread count and choose deterministic kernels; returns the device to compute on.

    Args:
        threads: torch threads inside one operation.
        exact: demand deterministic kernels; an operation that has none raises then.
    """
    # cuBLAS reads this once, when the first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return devices.current()


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Start every generator of this process at the stream of one step."""
    stream = fold("step", seed, step, rank)
    random.seed(stream)
    np.random.seed(stream % 2**32)
    torch.manual_seed(stream)


def generators() -> dict[str, Any]:
    """The state of every generator, as JSON values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
    }
    if torch.cuda.is_available():
        # This process's device alone: the others belong to other ranks.
        state["cuda"] = [bytes(torch.cuda.get_rng_state().numpy()).hex()]
    return state


def restore_generators(state: Mapping[str, Any]) -> None:
    """Inverse of `generators`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"][0]))


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
