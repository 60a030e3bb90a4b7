"""AdamW with gradient clipping and a schedule that counts policy versions.

Notable choices:
- The schedule's clock is the policy version, not the step: a step without a usable gradient moves
  neither moments nor learning rate, and a resumed or forked run continues where its weights are.
- Weights below float32 get float32 masters, which travel in the checkpoint: an update smaller than
  the weight's own precision is kept instead of rounded away. Their gradients are added up in float32
  too, each as it arrives, over micro-batches and over ranks.
- Of a sharded policy it holds this rank's slices, as plain tensors: AdamW acts on each element alone,
  and what needs all of them, the norm, is added up over the ranks.
- The state is a flat mapping of named tensors, so that it is stored as safetensors, never pickled.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from domain.config import Trainer
from trainer import sharding


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

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: Trainer,
        *,
        pool: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take hold of the parameters.

        Args:
            parameters: by name; of a sharded policy, after it was sharded.
            config: gives betas, eps, decay and clipping.
            pool: adds up a scalar over the processes that hold the other slices, if there are any.
        """
        self._config = config
        self._pool = pool
        self._parameters = dict(parameters)
        self._masters = {
            name: sharding.local(p).float().clone() if _narrow(p) else sharding.local(p)
            for name, p in parameters.items()
        }
        for name, p in parameters.items():
            if _narrow(p):
                hook = partial(self._arrived, name)
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        decayed = [m for n, m in self._masters.items() if parameters[n].dim() >= 2]
        plain = [m for n, m in self._masters.items() if parameters[n].dim() < 2]
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
        for name, p in self._parameters.items():
            p.grad = self._masters[name].grad = None

    def gradients(self, *, every: bool = False) -> list[Tensor]:
        """What has been added up since `clear`, to be changed in place.

        Args:
            every: of every parameter, zeros where there is none; else only those there are.
        """
        found = []
        for name, master in self._masters.items():
            self._take(name)
            if master.grad is None and every:
                master.grad = torch.zeros_like(master)
            if master.grad is not None:
                found.append(master.grad)
        return found

    def gradient_norm(self) -> Tensor:
        """Clip the gradients to `grad_clip` and return the norm of all of them before clipping."""
        bound = math.inf if self._config.grad_clip is None else self._config.grad_clip
        gradients = self.gradients()
        norm = torch.zeros(())
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients, foreach=False)
        if self._pool is not None:
            norm = self._pool(norm.double().square()).sqrt().to(norm.dtype)
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(
                list(self._masters.values()), bound, norm, foreach=False
            )
        return norm

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at this learning rate."""
        for name in self._parameters:
            self._take(name)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for name, p in self._parameters.items():
            if _narrow(p):
                sharding.local(p).copy_(self._masters[name])

    def state(self) -> dict[str, Tensor]:
        """Moments, counters and masters by `kind/parameter`."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for kind, tensor in self._adam.state[master].items():
                tensors[f"{kind}/{name}"] = tensor
            if _narrow(self._parameters[name]):
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

    def _arrived(self, name: str, _: Tensor) -> None:
        self._take(name)

    @torch.no_grad()
    def _take(self, name: str) -> None:
        """Have the parameter's gradient at its master: a narrow one is added there and dropped."""
        parameter, master = self._parameters[name], self._masters[name]
        if parameter.grad is None:
            return
        gradient = sharding.local(parameter.grad)
        if not _narrow(parameter):
            master.grad = gradient
            return
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None


def _narrow(parameter: Tensor) -> bool:
    return parameter.dtype.itemsize < torch.float32.itemsize
