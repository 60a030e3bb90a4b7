"""AdamW with gradient clipping and a schedule that counts policy versions.

Notable choices:
- The schedule's clock is the policy version, not the step: a step without a usable gradient moves
  neither moments nor learning rate, and a resumed or forked run continues where its weights are.
- Weights below float32 get float32 masters, which travel in the checkpoint: an update smaller than
  the weight's own precision is kept instead of rounded away.
- The state is a flat mapping of named tensors, so that it is stored as safetensors, never pickled.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from domain.config import Trainer


def learning_rate(config: Trainer, version: int, steps: int | None) -> float:
    """Rate of the update that leads from `version` to the next.

    Args:
        config: gives lr, warmup_steps and the schedule.
        version: policy version before the update.
        steps: where linear and cosine schedules reach zero.
    """
    if version < config.warmup_steps:
        return config.lr * (version + 1) / config.warmup_steps
    if config.schedule == "constant" or steps is None:
        return config.lr
    span = max(1, steps - config.warmup_steps)
    done = min(1.0, (version - config.warmup_steps) / span)
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * shape


class Optimizer:
    """AdamW over named parameters. Moments exist from the start, so its state has one shape."""

    def __init__(self, parameters: Mapping[str, Tensor], config: Trainer) -> None:
        self._config = config
        self._parameters = dict(parameters)
        self._masters = {
            name: p.detach().float().clone() if p.dtype != torch.float32 else p
            for name, p in parameters.items()
        }
        decayed = [m for m in self._masters.values() if m.dim() >= 2]
        plain = [m for m in self._masters.values() if m.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            foreach=False,
        )
        for master in self._masters.values():
            self._adam.state[master] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }

    def clear(self) -> None:
        """Forget gradients."""
        for p in self._parameters.values():
            p.grad = None

    def gradient_norm(self) -> Tensor:
        """Clip the gradients to `grad_clip` and return their norm before clipping."""
        bound = math.inf if self._config.grad_clip is None else self._config.grad_clip
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            return torch.zeros(())
        norm = torch.nn.utils.get_total_norm(gradients, foreach=False)
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(
                list(self._parameters.values()), bound, norm, foreach=False
            )
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for name, p in self._parameters.items():
            master = self._masters[name]
            if master is not p:
                master.grad = None if p.grad is None else p.grad.float()
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for name, p in self._parameters.items():
            master = self._masters[name]
            if master is not p:
                p.copy_(master)
                master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Moments, counters and masters by `kind/parameter`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for kind, tensor in self._adam.state[master].items():
                tensors[f"{kind}/{name}"] = tensor
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave.

        Raises:
            ValueError: the names or shapes are not this optimizer's.
        """
        mine = self.state()
        if mine.keys() != tensors.keys():
            odd = sorted(mine.keys() ^ tensors.keys())
            raise ValueError(f"optimizer state does not belong to this model: {odd[:5]} differ")
        for name, tensor in tensors.items():
            if mine[name].shape != tensor.shape:
                raise ValueError(
                    f"optimizer state {name} has shape {list(tensor.shape)}, expected "
                    f"{list(mine[name].shape)}"
                )
            mine[name].copy_(tensor)
