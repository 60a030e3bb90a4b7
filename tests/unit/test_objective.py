"""The loss: hand vectors in float64, finite differences, pooling, and what must be refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.mismatch import importance_weight, mismatch
from trainer.objective import KL, Entropy, loss_mass, policy_loss, pool_metrics

VECTORS = [  # A, b, p, c, w, r, loss, d loss / d c
    (1, -1, -0.8, -0.8, 1.221402758, 1, -1.221402758, -1.221402758),
    (1, -1, -0.8, -0.5, 1.221402758, 1.349858808, -1.465683310, 0),
    (1, -1, -0.8, -1.3, 1.221402758, 0.606530660, -0.740818221, -0.740818221),
    (-1, -1, -0.8, -0.5, 1.221402758, 1.349858808, 1.648721271, 1.648721271),
    (-1, -1, -0.8, -1.3, 1.221402758, 0.606530660, 0.977122207, 0),
    (1, -5, -1, -1, 2, 1, -2, -2),
    (1, -1, -3, -3, 0.135335283, 1, -0.135335283, -0.135335283),
    (-1, -4, -3, -1, 2, 7.389056099, 6.0, 0),
]


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def ones(n: int) -> Tensor:
    return torch.ones(1, n, dtype=torch.bool)


@pytest.mark.parametrize(("a", "b", "p", "c", "w", "r", "loss", "grad"), VECTORS)
def test_decoupled_ppo_by_hand(
    a: float, b: float, p: float, c: float, w: float, r: float, loss: float, grad: float
) -> None:
    current = row(c).requires_grad_()
    found, metrics = policy_loss(current, row(p), row(b), row(a), ones(1), importance=2.0)
    assert found.item() == pytest.approx(loss, abs=1e-9)
    assert torch.autograd.grad(found, current)[0].item() == pytest.approx(grad, abs=1e-9)
    assert metrics["mismatch/behavior_importance_mean"].item() == pytest.approx(w, abs=1e-9)
    assert math.exp(c - p) == pytest.approx(r, abs=1e-9)


def test_a_band_keeps_the_weight_inside_and_zeroes_it_outside() -> None:
    outside, metrics = policy_loss(
        row(-1), row(-1), row(-5), row(1), ones(1), importance=(0.5, 5.0)
    )
    assert outside.item() == 0
    assert metrics["mismatch/corrected"] == 1
    edge = math.log(5.0)  # inclusive
    inside, _ = policy_loss(
        row(-1), row(-1), row(-1 - edge + 1e-12), row(1), ones(1), importance=(0.5, 5.0)
    )
    assert inside.item() == pytest.approx(-5.0)


@pytest.mark.parametrize("band", [(1.0, 2.0), (0.5, 1.0)])
def test_the_ends_of_a_band_belong_to_it(band: tuple[float, float]) -> None:
    on_policy = torch.zeros(1, dtype=torch.float64)
    assert importance_weight(on_policy, band).item() == 1
    assert importance_weight(on_policy + 1e-9, (0.5, 1.0)).item() == 0


def test_the_effective_share_is_kishs() -> None:
    """Weights 1 and 1/2: (3/4)² / (5/8)."""
    drift = torch.tensor([0.0, -math.log(2)], dtype=torch.float64)
    told = mismatch(drift, torch.ones(2, dtype=torch.bool), 5.0)
    assert told["mismatch/ess"].item() == pytest.approx(0.9)


def test_cap_and_band_leave_the_denominator_alone() -> None:
    c, b, a = row(-1, -1), row(-1, -9), row(1, 1)
    loss, metrics = policy_loss(c, c, b, a, ones(2), importance=(0.5, 5.0))
    assert loss.item() == pytest.approx(-0.5)
    assert metrics["mass"] == 2


def test_the_first_update_is_plain_weighted_reinforce() -> None:
    c = row(-0.3, -1.2, -2.0).requires_grad_()
    b, a = row(-0.5, -1.0, -2.5), row(0.7, -0.4, 1.1)
    loss, metrics = policy_loss(c, c.detach(), b, a, ones(3), importance=5.0)
    w = torch.exp(c.detach() - b)
    assert loss.item() == pytest.approx(-(w * a).mean().item())
    assert torch.autograd.grad(loss, c)[0] == pytest.approx(-(w * a) / 3)
    assert metrics["pg_clipfrac"] == 0
    assert metrics["pg_clipfrac_lower"] == 0


def test_clip_higher_moves_the_upper_bound_alone() -> None:
    loss, metrics = policy_loss(
        row(-0.5), row(-0.8), row(-0.8), row(1), ones(1), epsilon_low=0.2, epsilon_high=0.28
    )
    assert loss.item() == pytest.approx(-1.28)
    assert metrics["pg_clipfrac"] == 1


def test_dual_clip_counts_and_can_be_off() -> None:
    arguments = (row(-1), row(-3), row(-3), row(-1), ones(1))
    loss, metrics = policy_loss(*arguments)
    assert loss.item() == pytest.approx(3.0)
    assert metrics["pg_clipfrac_lower"] == 1
    loss, metrics = policy_loss(*arguments, dual_clip=None)
    assert loss.item() == pytest.approx(math.e**2)
    assert metrics["pg_clipfrac_lower"] == 0


def test_cispo_weighs_the_log_probability_by_the_clipped_ratio() -> None:
    c = row(-0.5, -0.8).requires_grad_()
    loss, metrics = policy_loss(
        c, row(-0.8, -0.8), row(-1, -0.8), row(1, -1), ones(2), kind="cispo", importance=2.0
    )
    w = math.exp(0.2)
    assert loss.item() == pytest.approx((-w * 1.2 * 1 * -0.5 + -1 * -1 * -0.8) / 2)
    assert torch.autograd.grad(loss, c)[0].tolist()[0] == pytest.approx([-w * 1.2 / 2, 0.5])
    assert metrics["pg_clipfrac"] == 0.5


def test_gspo_takes_the_ratio_and_the_mean_over_chains() -> None:
    p = row(-1, -1, -1, -1, -1)
    c = row(-0.9, -1.0, -0.8, -1.1, -1.2).requires_grad_()
    chains = torch.tensor([[1, 1, 1, 2, 2]])
    a = row(1, 1, 1, -1, -1)
    wide = {"epsilon_low": 0.9, "epsilon_high": 0.9}
    loss, metrics = policy_loss(c, p, p, a, ones(5), kind="gspo", segment_ids=chains, **wide)  # type: ignore[arg-type]
    s1, s2 = math.exp(0.1), math.exp(-0.15)
    assert loss.item() == pytest.approx((-s1 + s2) / 2)
    grad = torch.autograd.grad(loss, c)[0].tolist()[0]
    assert grad == pytest.approx([-s1 / 6] * 3 + [s2 / 4] * 2)
    assert metrics["mass"].item() == pytest.approx(2)
    _, metrics = policy_loss(
        c, p, p, a, ones(5), kind="gspo", segment_ids=chains, epsilon_low=3e-4, epsilon_high=4e-4
    )
    assert metrics["pg_clipfrac"].item() == pytest.approx(
        1
    )  # both chains left the tiny trust region on the bad side
    assert metrics["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize(
    ("d", "k1", "k2", "k3"),
    [(-0.5, 0.5, 0.125, 0.1065306597), (0.3, -0.3, 0.045, 0.0498588076)],
)
def test_kl_estimators_by_hand(d: float, k1: float, k2: float, k3: float) -> None:
    c = row(-1.0)
    for kind, expected in (("k1", k1), ("k2", k2), ("k3", k3)):
        kl = KL(reference=c + d, coefficient=0.5, kind=kind)  # type: ignore[arg-type]
        loss, metrics = policy_loss(c, c, c, row(0), ones(1), kl=kl)
        assert metrics["kl"].item() == pytest.approx(expected, abs=1e-9)
        assert loss.item() == pytest.approx(0.5 * expected, abs=1e-9)


def test_kl_of_filtered_sampling_uses_the_whole_vocabulary() -> None:
    kl = KL(reference=row(-1.5), coefficient=1.0, kind="k1", current=row(-1.2))
    _, metrics = policy_loss(row(-0.7), row(-0.7), row(-0.7), row(1), ones(1), kl=kl)
    assert metrics["kl"].item() == pytest.approx(0.3)


def test_entropy_is_a_metric_and_becomes_a_bonus_with_a_coefficient() -> None:
    c, values = row(-1, -1), row(0.5, 1.5)
    for coefficient in (0.0, 0.1):
        entropy = Entropy(values=values, coefficient=coefficient)
        loss, metrics = policy_loss(c, c, c, row(0, 0), ones(2), entropy=entropy)
        assert metrics["entropy"] == 1.0
        assert loss.item() == pytest.approx(-coefficient)


POOLED = {
    "token-mean": {},
    "rollout-mean": {"aggregation": "rollout-mean"},
    "gspo": {"kind": "gspo"},
    "sequence mask": {"sequence_mask": (0.3, 3.0)},
}


@pytest.mark.parametrize("settings", POOLED.values(), ids=POOLED)
def test_losses_of_parts_add_up_to_the_loss_of_the_whole(settings: dict[str, Any]) -> None:
    """Micro-batches or processes, uneven on purpose; a mean of means would be another number."""
    generator = torch.Generator().manual_seed(3)
    c, p, b, a = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(4, 6, generator=generator) < 0.5
    mask[0] = torch.arange(6) < 1
    weights = mask / mask.sum(1, keepdim=True).clamp(min=1)  # one rollout a row
    chains = torch.tensor([[1, 1, 1, 2, 2, 2]] * 4)
    parts = [slice(0, 1), slice(1, 4)]
    layout: list[dict[str, Any]] = [
        {"weights": weights[part], "segment_ids": chains[part]} for part in parts
    ]

    whole, metrics = policy_loss(
        c, p, b, a, mask, importance=2.0, weights=weights, segment_ids=chains, **settings
    )
    mass = torch.stack(
        [
            loss_mass(p[part], b[part], mask[part], **extra, **settings)
            for part, extra in zip(parts, layout, strict=True)
        ]
    ).sum()
    found = [
        policy_loss(
            c[part], p[part], b[part], a[part], mask[part],
            importance=2.0, normaliser=mass, **extra, **settings,
        )
        for part, extra in zip(parts, layout, strict=True)
    ]  # fmt: skip
    assert sum(loss.item() for loss, _ in found) == pytest.approx(whole.item())
    for name, value in pool_metrics([part for _, part in found]).items():
        assert value == pytest.approx(metrics[name].item()), name
    means = [
        policy_loss(c[part], p[part], b[part], a[part], mask[part], importance=2.0,
                    **extra, **settings)[0].item()
        for part, extra in zip(parts, layout, strict=True)
    ]  # fmt: skip
    assert sum(means) / 2 != pytest.approx(whole.item())


def test_rollout_mean_is_the_mean_of_token_means() -> None:
    c = row(-1, -1, -1, -1)
    a = row(1, 2, 3, 10)
    weights = row(1 / 3, 1 / 3, 1 / 3, 1)
    loss, metrics = policy_loss(c, c, c, a, ones(4), aggregation="rollout-mean", weights=weights)
    assert loss.item() == pytest.approx(-(2 + 10) / 2)
    assert metrics["mass"].item() == pytest.approx(2)


def test_a_rejected_chain_leaves_numerator_and_denominator() -> None:
    c = row(-1, -1, -1)
    b = row(-1, -1, -4)  # the second chain's geometric mean ratio is e^3
    chains = torch.tensor([[1, 1, 2]])
    loss, metrics = policy_loss(
        c, c, b, row(1, 3, 5), ones(3), sequence_mask=(0.5, 2.0), segment_ids=chains
    )
    assert loss.item() == pytest.approx(-2.0)
    assert metrics["mass"] == 2
    assert metrics["mismatch/max"] == 3
    long, metrics = (
        policy_loss(  # geometric: the product e^1.2 would leave the band, the mean stays
            c,
            c,
            c - 0.4,
            row(1, 1, 1),
            ones(3),
            sequence_mask=(0.5, 2.0),
            segment_ids=chains * 0 + 1,
        )
    )
    assert metrics["mass"] == 3
    assert long.item() == pytest.approx(-1)
    nothing, metrics = policy_loss(
        c, c, b - 9, row(1, 3, 5), ones(3), sequence_mask=(0.5, 2.0), segment_ids=chains
    )
    assert nothing.item() == 0
    assert metrics["mass"] == 0


def test_a_batch_without_tokens_has_loss_zero_and_gradients_zero() -> None:
    c = torch.full((2, 3), math.nan, dtype=torch.float64, requires_grad=True)
    empty = torch.zeros(2, 3, dtype=torch.bool)
    kl = KL(reference=c.detach(), coefficient=0.1)
    entropy = Entropy(values=c.detach(), coefficient=0.1)
    loss, metrics = policy_loss(
        c, c.detach(), c.detach(), c.detach(), empty, importance=5.0, kl=kl, entropy=entropy
    )
    assert loss.item() == 0
    assert torch.autograd.grad(loss, c)[0].tolist() == [[0.0] * 3] * 2
    assert all(math.isfinite(value) for value in metrics.values())


def test_whatever_stands_on_context_is_ignored() -> None:
    mask = torch.tensor([[False, True]])
    junk, c = math.nan, torch.tensor([[math.nan, -1.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(c, row(junk, -1), row(math.inf, -1), row(junk, 1), mask, importance=5.0)
    assert loss.item() == -1
    assert torch.autograd.grad(loss, c)[0].tolist() == [[0.0, -1.0]]


def test_without_a_proximal_policy_it_is_plain_ppo_against_behaviour() -> None:
    c, b, a = row(-0.5, -1.3), row(-0.8, -0.8), row(1, -1)
    plain, _ = policy_loss(c, None, b, a, ones(2))
    decoupled, _ = policy_loss(c, b, b, a, ones(2), importance=5.0)
    assert plain.item() == pytest.approx(decoupled.item(), abs=1e-12)
    with pytest.raises(ValueError, match="corrects already"):
        policy_loss(c, None, b, a, ones(2), importance=5.0)
    banded, _ = policy_loss(c, None, b, a, ones(2), importance=(0.9, 1.5))
    assert banded.item() == pytest.approx(-1.2 / 2)  # the second token's ratio is .607


def test_mismatch_statistics_by_hand() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    drift = torch.log(torch.tensor([4.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    found = mismatch(drift, mask, 2.0)
    assert found["mismatch/ess"].item() == pytest.approx(0.727273, abs=1e-6)
    assert found["mismatch/corrected"] == 0.25
    assert found["mismatch/behavior_importance_mean"] == 1.0
    assert found["mismatch/max"].item() == pytest.approx(math.log(4))
    # everything below speaks of the uncapped ratio
    mean = drift.mean().item()
    assert found["mismatch/kl"].item() == pytest.approx(-mean)
    assert found["mismatch/k3"].item() == pytest.approx((4 + 1 + 0.5 + 0.5) / 4 - 1 - mean)
    assert found["mismatch/chi2_token"].item() == pytest.approx((16 + 1 + 0.25 + 0.25) / 4 - 1)
    assert found["mismatch/kl_sample_train_v2"].item() == pytest.approx(
        drift.square().mean().item() / 2
    )


def gradient_by_differences(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    step, grad = 1e-6, torch.zeros_like(at)
    for index in _indices(at):
        for sign in (1, -1):
            moved = at.clone()
            moved[index] += sign * step
            grad[index] += sign * loss(moved).item() / (2 * step)
    return grad


def _indices(at: Tensor) -> list[tuple[int, int]]:
    return [(r, w) for r in range(at.shape[0]) for w in range(at.shape[1])]


CHAINS = torch.tensor([[1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"importance": 1.2},
        {"importance": (0.7, 1.4)},
        {"importance": 1.2, "aggregation": "rollout-mean"},
        {"importance": 1.2, "sequence_mask": (0.8, 1.3), "segment_ids": CHAINS},
        {"dual_clip": None},
        {"kl": "k1"},
        {"kl": "k2"},
        {"kl": "k3", "importance": 1.2},
        {"entropy": 0.3},
    ],
    ids=str,
)
def test_gradients_agree_with_finite_differences(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(2, 7, generator=generator, dtype=torch.float64)

    b = -1.5 + draw(0.3)
    p, c, a = b + draw(0.3), b + draw(0.3), draw(1.0)
    mask = torch.rand(2, 7, generator=generator) < 0.7
    weights = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    reference = b + draw(0.3)

    def loss(current: Tensor) -> Tensor:
        chosen = dict(settings)
        if "kl" in chosen:
            chosen["kl"] = KL(reference=reference, coefficient=0.5, kind=chosen["kl"])
        if "entropy" in chosen:
            values = -current * torch.exp(current)
            chosen["entropy"] = Entropy(values=values, coefficient=chosen["entropy"])
        return policy_loss(current, p, b, a, mask, weights=weights, **chosen)[0]

    c.requires_grad_()
    exact = torch.autograd.grad(loss(c), c)[0]
    assert exact == pytest.approx(gradient_by_differences(loss, c.detach()), abs=1e-8)


@pytest.mark.parametrize("kind", ["cispo", "gspo"])
def test_gradients_with_stopped_parts_agree_with_differences_around_them(kind: str) -> None:
    """The stopped ratio is held at its value while c moves, as the formulas say."""
    generator = torch.Generator().manual_seed(5)
    b = -1.5 + 0.2 * torch.randn(2, 7, generator=generator, dtype=torch.float64)
    p = b + 0.1
    c = (p + 0.02 * torch.randn(2, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    a = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    mask = CHAINS > 0
    found, _ = policy_loss(
        c, p, b, a, mask, kind=kind, importance=2.0, segment_ids=CHAINS  # type: ignore[arg-type]
    )  # fmt: skip
    w = torch.exp(p - b).clamp(max=2.0)

    def held(current: Tensor) -> Tensor:
        if kind == "cispo":
            ratio = torch.exp(c.detach() - p).clamp(0.8, 1.2)
            return (-w * ratio * a * current * mask).sum() / mask.sum()
        total = torch.zeros((), dtype=torch.float64)
        chains = [(r, k) for r in range(2) for k in (1, 2)]
        for r, k in chains:
            at = CHAINS[r] == k
            s = torch.exp((c.detach() - p)[r, at].mean())
            ratio = s * torch.exp(current[r, at] - c.detach()[r, at])
            terms = torch.maximum(-a[r, at] * ratio, -a[r, at] * ratio.clamp(0.8, 1.2))
            total = total + (w[r, at] * terms).mean()
        return total / len(chains)

    assert found.item() == pytest.approx(held(c.detach()).item(), abs=1e-12)
    exact = torch.autograd.grad(found, c)[0]
    assert exact == pytest.approx(gradient_by_differences(held, c.detach()), abs=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "trpo"}, "loss 'trpo' is unknown; choose one of ppo"),
        ({"aggregation": "sum"}, "aggregation 'sum' is unknown"),
        ({"aggregation": "rollout-mean"}, "needs weights: rollout_weights"),
        ({"kind": "gspo"}, "pass segment_ids"),
        ({"sequence_mask": (0.9, 1.1)}, "pass segment_ids"),
        ({"sequence_mask": (2.0, 1.1), "segment_ids": torch.ones(1, 1)}, "must rise"),
        ({"importance": 0.0}, "must be a positive cap"),
        ({"importance": (2.0, 1.0)}, "is no band"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0 must be above 1"),
        ({"epsilon_low": -0.1}, "must be >= 0"),
        ({"kl": KL(reference=row(0), coefficient=1.0, kind="k9")}, "kl 'k9' is unknown"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(row(-1), row(-1), row(-1), row(1), ones(1), **settings)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"behavior has shape \(1, 2\), current \(1, 1\)"):
        policy_loss(row(-1), row(-1), row(-1, -1), row(1), ones(1))
