"""What holds for the loss of any rows."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.objective import KL, loss_mass, policy_loss

ROWS, WIDTH = 4, 6
SETTINGS: list[dict[str, Any]] = [
    {"kind": kind, "aggregation": aggregation, "importance": importance, **mask}
    for kind in ("ppo", "cispo", "gspo")
    for aggregation in ("token-mean", "rollout-mean")
    for importance in (None, 2.0, (0.5, 2.0))
    for mask in ({}, {"sequence_mask": (0.5, 2.0)})
]
settings = st.sampled_from(SETTINGS)
seeds = st.integers(0, 2**31)


class Case:
    """Random rows: c, p, b around each other, two chains a row, one rollout a chain."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)

        def near(x: Any, spread: float) -> Tensor:
            return torch.as_tensor(x + random.normal(0, spread, (ROWS, WIDTH)))

        self.behavior = near(-1.5, 0.5)
        self.proximal = near(self.behavior.numpy(), 0.4)
        self.current = near(self.proximal.numpy(), 0.4)
        self.advantages = near(0.0, 1.0)
        self.mask = torch.as_tensor(random.random((ROWS, WIDTH)) < random.random())
        self.segment_ids = torch.tensor([[1] * 2 + [2] * 3 + [0]] * ROWS)
        self.mask &= self.segment_ids > 0
        self.weights = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for row in range(ROWS):
            for chain in (1, 2):
                at = self.mask[row] & (self.segment_ids[row] == chain)
                self.weights[row, at] = 1 / max(int(at.sum()), 1)

    def loss(
        self, rows: Any = slice(None), **chosen: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss, gradient at c, metrics) of some rows."""
        c = self.current[rows].clone().requires_grad_()
        loss, metrics = policy_loss(
            c,
            self.proximal[rows],
            self.behavior[rows],
            self.advantages[rows],
            self.mask[rows],
            weights=self.weights[rows],
            segment_ids=self.segment_ids[rows],
            **chosen,
        )
        return loss.detach(), torch.autograd.grad(loss, c)[0], metrics


@given(seeds, settings, st.permutations(range(ROWS)))
def test_the_order_of_rows_changes_nothing(
    seed: int, chosen: dict[str, Any], order: list[int]
) -> None:
    case = Case(seed)
    loss, gradient, metrics = case.loss(**chosen)
    moved, moved_gradient, moved_metrics = case.loss(order, **chosen)
    assert moved.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(moved_gradient, gradient[order], atol=1e-12)
    assert {n: v.item() for n, v in moved_metrics.items()} == pytest.approx(
        {n: v.item() for n, v in metrics.items()}, abs=1e-9
    )


@given(seeds, settings, st.integers(0, ROWS))
def test_two_processes_with_pooled_mass_equal_one(
    seed: int, chosen: dict[str, Any], split: int
) -> None:
    case = Case(seed)
    loss, gradient, _ = case.loss(**chosen)
    parts = [slice(0, split), slice(split, ROWS)]
    without_weight = {n: v for n, v in chosen.items() if n != "importance"}
    mass = sum(
        loss_mass(
            case.proximal[part],
            case.behavior[part],
            case.mask[part],
            weights=case.weights[part],
            segment_ids=case.segment_ids[part],
            **without_weight,
        ).item()
        for part in parts
    )
    found = [case.loss(part, normaliser=mass, **chosen) for part in parts]
    assert sum(part.item() for part, _, _ in found) == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(torch.cat([g for _, g, _ in found]), gradient, atol=1e-12)


@given(seeds, settings)
def test_a_masked_only_batch_is_zero_without_nan(seed: int, chosen: dict[str, Any]) -> None:
    case = Case(seed)
    case.mask[:] = False
    case.current[:] = torch.nan
    loss, gradient, metrics = case.loss(**chosen)
    assert loss.item() == 0
    assert (gradient == 0).all()
    assert metrics["mass"] == 0
    assert all(value.isfinite() for value in metrics.values())


@given(seeds, settings)
def test_the_first_update_clips_nothing(seed: int, chosen: dict[str, Any]) -> None:
    case = Case(seed)
    case.current = case.proximal
    _, gradient, metrics = case.loss(**chosen)
    assert metrics["pg_clipfrac"] == 0
    assert metrics["pg_clipfrac_lower"] == 0
    assert metrics["ppo_kl"] == 0
    if chosen == {"kind": "ppo", "aggregation": "token-mean", "importance": None}:
        mean = case.advantages * case.mask / case.mask.sum().clamp(min=1)
        assert torch.allclose(gradient, -mean, atol=1e-12)


@given(seeds, st.sampled_from(["token-mean", "rollout-mean"]))
def test_behaviour_as_proximal_is_plain_ppo(seed: int, aggregation: str) -> None:
    case = Case(seed)
    case.proximal = case.behavior
    decoupled, _, _ = case.loss(importance=5.0, aggregation=aggregation)
    ratio = torch.exp(case.current - case.behavior)
    terms = torch.maximum(
        -case.advantages * ratio, -case.advantages * ratio.clamp(1 - 0.2, 1 + 0.2)
    )
    terms = torch.where(case.advantages < 0, terms.minimum(-3 * case.advantages), terms)
    share = case.mask.double() if aggregation == "token-mean" else case.weights
    plain = (share * terms).sum() / share.sum().clamp(min=1e-9)
    assert decoupled.item() == pytest.approx(plain.item(), abs=1e-9)


@given(seeds, st.floats(0.2, 3.0))
def test_the_loss_takes_the_capped_weight_and_the_mismatch_the_uncapped_one(
    seed: int, cap: float
) -> None:
    case = Case(seed)
    case.current = case.proximal
    _, gradient, metrics = case.loss(importance=cap)
    drift = (case.proximal - case.behavior)[case.mask]
    if drift.numel() == 0:
        return
    weight = torch.exp(drift).clamp(max=cap)
    assert torch.allclose(
        gradient[case.mask], -weight * case.advantages[case.mask] / len(drift), atol=1e-12
    )
    k3 = (torch.exp(drift) - drift - 1).mean().item()
    assert metrics["mismatch/k3"].item() == pytest.approx(k3, abs=1e-9)
    assert metrics["mismatch/kl"].item() == pytest.approx(-drift.mean().item(), abs=1e-12)
    kish = (weight.mean() ** 2 / weight.square().mean()).item()
    assert metrics["mismatch/ess"].item() == pytest.approx(kish)


@given(seeds, st.sampled_from(["k1", "k2", "k3"]))
def test_context_takes_no_loss_and_no_kl(seed: int, kind: str) -> None:
    case = Case(seed)
    kl = KL(reference=case.behavior, coefficient=1.0, kind=kind)  # type: ignore[arg-type]
    loss, gradient, _ = case.loss(kl=kl)
    assert (gradient[~case.mask] == 0).all()
    case.advantages[~case.mask] = 1e6
    case.current[~case.mask] = -50.0
    again, _, _ = case.loss(kl=kl)
    assert again.item() == loss.item()
