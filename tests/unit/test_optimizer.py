"""AdamW, its schedule and its state."""

import math
from typing import Literal

import pytest
import torch

from domain.config import Trainer
from trainer.optimizer import Optimizer, learning_rate


@pytest.mark.parametrize(
    ("schedule", "version", "expected"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 50, 1.0),
        ("linear", 4, 1.0),
        ("linear", 12, 0.5),
        ("linear", 20, 0.0),
        ("linear", 25, 0.0),
        ("cosine", 4, 1.0),
        ("cosine", 8, 0.5 * (1 + math.cos(math.pi / 4))),
        ("cosine", 20, 0.0),
    ],
)
def test_the_learning_rate_follows_the_policy_version(
    schedule: Literal["constant", "linear", "cosine"], version: int, expected: float
) -> None:
    config = Trainer(lr=1.0, warmup_steps=4, schedule=schedule)
    assert learning_rate(config, version, 20) == pytest.approx(expected, abs=1e-12)


Parameters = dict[str, torch.nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    torch.manual_seed(0)
    return {
        "w": torch.nn.Parameter(torch.randn(3, 4).to(dtype)),
        "b": torch.nn.Parameter(torch.randn(4).to(dtype)),
    }


def gradient(parameters: Parameters, seed: int) -> None:
    torch.manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn(p.shape).to(p.dtype)


def norm(parameters: Parameters) -> float:
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    straight, config = parameters(dtype), Trainer(lr=0.1, weight_decay=0.1)
    one = Optimizer(straight, config)
    for seed in range(3):
        gradient(straight, seed)
        one.step(0.1)
        one.clear()
    resumed = {n: torch.nn.Parameter(p.detach().clone()) for n, p in straight.items()}
    other = Optimizer(resumed, config)
    other.restore({n: t.clone() for n, t in one.state().items()})
    for seed in range(3, 6):
        for params, optimizer in ((straight, one), (resumed, other)):
            gradient(params, seed)
            optimizer.step(0.1)
            optimizer.clear()
    assert all(torch.equal(straight[n], resumed[n]) for n in straight)
    assert all(torch.equal(t, other.state()[n]) for n, t in one.state().items())


def test_updates_below_the_precision_of_bfloat16_add_up_in_the_masters() -> None:
    weight = {"w": torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))}
    optimizer = Optimizer(weight, Trainer(lr=1e-4))
    for _ in range(100):
        weight["w"].grad = torch.ones(2, 2, dtype=torch.bfloat16)
        optimizer.step(1e-4)
        optimizer.clear()
    assert float(weight["w"].detach()[0, 0]) == pytest.approx(0.99, abs=4e-3)


def test_gradients_are_clipped_to_the_bound_and_the_norm_is_the_one_before() -> None:
    params = parameters()
    optimizer = Optimizer(params, Trainer(grad_clip=1.0))
    gradient(params, 1)
    before = norm(params)
    assert float(optimizer.gradient_norm()) == pytest.approx(before, rel=1e-6)
    assert norm(params) == pytest.approx(1.0, rel=1e-4)


def test_biases_do_not_decay() -> None:
    params = parameters()
    optimizer = Optimizer(params, Trainer(weight_decay=0.5))
    before = {n: p.detach().clone() for n, p in params.items()}
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    assert torch.equal(params["b"], before["b"])
    assert not torch.equal(params["w"], before["w"])


def test_a_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer(parameters(), Trainer())
    state = optimizer.state()
    with pytest.raises(ValueError, match="does not belong to this model"):
        optimizer.restore({n: t for n, t in state.items() if not n.endswith("/b")})
