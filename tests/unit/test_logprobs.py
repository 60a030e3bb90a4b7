"""Log-probabilities of packed ids: alignment, temperature, recorded kept sets, chunks."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from domain.rollouts import Rollout, Segment, Status
from trainer.logprobs import Scores, next_token_log_probs, score
from trainer.objective import policy_loss
from trainer.packing import pack


def one_token(logits: Sequence[float], target: int, kept: Sequence[int], t: float = 1.0) -> float:
    """The log-probability of `target` in column 1, given the logits of column 0."""
    scores = next_token_log_probs(
        torch.tensor([[logits, [0.0] * len(logits)]], dtype=torch.float64),
        torch.tensor([[0, target]]),
        temperature=t,
        support_ids=torch.tensor([[*kept, -1]]),
        support_columns=torch.tensor([[*[1] * len(kept), -1]]),
    )
    assert scores[0, 0] == 0
    return scores[0, 1].item()


PROBS = [math.log(p) for p in (0.4, 0.3, 0.2, 0.08, 0.02)]


@pytest.mark.parametrize(
    ("logits", "kept", "target", "temperature", "expected"),
    [
        (PROBS, [], 1, 1.0, -1.203973),
        (PROBS, [0, 1, 2], 1, 1.0, -1.098612),  # top_p = .8, or min_p = .3
        (PROBS, [1, 0], 1, 1.0, -0.847298),  # top_k = 2
        (PROBS, [0, 1], 1, 0.5, -1.021651),  # T = .5, top_p = .8
        ([2, 0.5, 1, -1, 0], [0, 2, 4], 2, 1.0, -1.407606),
        ([2, 0.5, 1, -1, 0], [], 2, 1.0, -1.574438),
    ],
)
def test_hand_vectors(
    logits: list[float], kept: list[int], target: int, temperature: float, expected: float
) -> None:
    assert one_token(logits, target, kept, temperature) == pytest.approx(expected, abs=1e-6)


def test_half_temperature_squares_the_odds() -> None:
    expected = [0.539084, 0.303235, 0.134771, 0.021563, 0.001348]
    found = [math.exp(one_token(PROBS, target, [], 0.5)) for target in range(5)]
    assert found == pytest.approx(expected, abs=1e-6)


def sampler_filter(logits_V: Tensor, t: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids a sampler keeps, in vLLM's order: temperature, min-p, top-k, top-p."""
    probs = torch.softmax(logits_V / t, -1)
    keep = probs >= min_p * probs.max()
    keep &= probs >= probs.sort(descending=True).values[top_k - 1]
    probs = torch.where(keep, probs, 0)
    ranked = (probs / probs.sum()).sort(descending=True)
    head = int((ranked.values.cumsum(0) < top_p).sum()) + 1
    return [int(v) for v in ranked.indices[:head] if keep[v]]


def test_the_ragged_kernel_agrees_with_a_dense_mask() -> None:
    """2 rows, 8 columns, 11 ids; T = .7, top_k 5, top_p .9, min_p .02; 12 filtered tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 11, generator=generator) * 2
    ids = torch.zeros(2, 8, dtype=torch.long)
    dense = torch.zeros(2, 8, 11, dtype=torch.bool)
    kept: list[list[int]] = [[], []]
    owners: list[list[int]] = [[], []]
    for row in range(2):
        for column in range(1, 8):
            ids[row, column] = torch.randint(11, (1,), generator=generator)
            if column == 4:
                dense[row, column] = True  # not filtered
                continue
            chosen = sampler_filter(logits[row, column - 1], 0.7, 5, 0.9, 0.02)
            ids[row, column] = chosen[column % len(chosen)]
            dense[row, column, chosen] = True
            kept[row] += chosen
            owners[row] += [column] * len(chosen)
    assert sum(len(set(columns)) for columns in owners) == 12
    capacity = 48

    def padded(values: list[list[int]]) -> Tensor:
        return torch.tensor([v + [-1] * (capacity - len(v)) for v in values])

    found = next_token_log_probs(
        logits,
        ids,
        temperature=0.7,
        support_ids=padded(kept),
        support_columns=padded(owners),
    )
    shifted = torch.where(dense[:, 1:], logits[:, :-1] / 0.7, -torch.inf)
    expected = shifted.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert (found[:, 1:] - expected).abs().max() < 2e-6
    assert (found[:, 0] == 0).all()


def random_case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 9, 5, generator=generator, dtype=dtype)
    head = torch.nn.Linear(5, 13, bias=False, dtype=dtype)
    torch.nn.init.normal_(head.weight, generator=generator)
    return hidden, head, torch.randint(13, (2, 9), generator=generator)


def with_supports(ids: Tensor, every: int = 2) -> tuple[Tensor, Tensor]:
    kept, owners = [], []
    for row in ids:
        columns = range(1, len(row), every)
        kept.append([v for c in columns for v in (int(row[c]), (int(row[c]) + 1) % 13)])
        owners.append([c for c in columns for _ in range(2)])
    return torch.tensor(kept), torch.tensor(owners)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunks_give_the_same_scores_and_gradients(chunk: int) -> None:
    hidden, head, ids = random_case()
    support_ids, support_columns = with_supports(ids)

    def run(size: int) -> tuple[Scores, list[Tensor]]:
        leaf = hidden.clone().requires_grad_()
        scores = score(
            leaf,
            head,
            ids,
            temperature=0.8,
            support_ids=support_ids,
            support_columns=support_columns,
            entropy=True,
            chunk=size,
        )
        assert scores.entropy is not None
        total = (scores.log_probs + 2 * scores.full).sum() + scores.entropy.square().sum()
        return scores, list(torch.autograd.grad(total, [leaf, head.weight]))

    whole, exact = run(1000)
    parts, found = run(chunk)
    assert torch.allclose(parts.log_probs, whole.log_probs, atol=1e-12)
    assert torch.allclose(parts.full, whole.full, atol=1e-12)
    for a, b in zip(found, exact, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    hidden, head, ids = random_case()
    support_ids, support_columns = with_supports(ids)

    def total(leaf: Tensor) -> Tensor:
        found = score(
            leaf,
            head,
            ids,
            temperature=0.8,
            support_ids=support_ids,
            support_columns=support_columns,
            entropy=True,
            chunk=4,
        )
        assert found.entropy is not None
        return torch.stack([found.log_probs.sum(), found.full.sum(), found.entropy.sum()])

    torch.autograd.gradcheck(total, hidden.requires_grad_())


def test_only_masked_ids_are_scored() -> None:
    hidden, head, ids = random_case()
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 3] = mask[1, 8] = True
    calls: list[int] = []

    def counted(context: Tensor) -> Tensor:
        calls.append(len(context))
        logits: Tensor = head(context)
        return logits

    some = score(hidden, counted, ids, mask=mask).log_probs
    everything = score(hidden, head, ids).log_probs
    assert calls == [2]
    assert torch.allclose(some[mask], everything[mask], atol=1e-12)
    assert (some[~mask] == 0).all()


def test_nothing_to_score_still_has_a_graph() -> None:
    hidden, head, ids = random_case()
    leaf = hidden.requires_grad_()
    found = score(leaf, head, ids, mask=torch.zeros_like(ids), entropy=True)
    assert found.entropy is not None
    (grad,) = torch.autograd.grad((found.log_probs + found.entropy).sum(), leaf)
    assert (grad == 0).all()


def test_entropy_of_ruled_out_tokens_is_no_nan() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    found = score(logits, lambda x: x, torch.tensor([[0, 1]]), entropy=True)
    assert found.entropy is not None
    assert found.entropy[0, 1].item() == pytest.approx(math.log(2))
    (grad,) = torch.autograd.grad(found.entropy.sum() + found.log_probs.sum(), logits)
    assert grad.isfinite().all()


def test_the_whole_vocabulary_as_kept_set_changes_nothing() -> None:
    hidden, head, ids = random_case()
    everything = torch.arange(13).repeat(2, 8)
    owners = torch.arange(1, 9).repeat_interleave(13).repeat(2, 1)
    found = score(hidden, head, ids, support_ids=everything, support_columns=owners)
    assert torch.allclose(found.log_probs, found.full, atol=1e-12)


def test_filtered_sampling_on_policy_has_ratio_one_only_with_its_support() -> None:
    """top_p = .8 over PROBS keeps {0, 1, 2}; the sampler's log-probability is renormalised."""
    behavior = math.log(0.3 / 0.9)
    segment = Segment([0], [1], [behavior], "stop", 0, support=[(0, 1, 2)])
    rollout = Rollout("t", 0, 0, 0, [segment], Status.COMPLETED, 1.0)
    packed = {n: torch.from_numpy(a) for n, a in pack([rollout], 2, support_capacity=3).items()}
    logits = torch.tensor([[PROBS, PROBS]])
    supports = {n: packed[n] for n in ("support_ids", "support_columns")}
    drift = {}
    for name, kept in (("recorded", supports), ("lost", dict.fromkeys(supports))):
        c = next_token_log_probs(logits, packed["input_ids"], **kept)
        ones = torch.ones_like(c)
        _, metrics = policy_loss(
            c, c, packed["behavior_logprobs"], ones, packed["response_mask"], importance=5.0
        )
        drift[name] = metrics["mismatch/kl"].item()
    assert drift["recorded"] == pytest.approx(0, abs=1e-6)
    assert drift["lost"] == pytest.approx(-math.log(0.9), abs=1e-6)


def test_greedy_sampling_has_no_log_probabilities_to_train_on() -> None:
    with pytest.raises(ValueError, match="temperature = 0"):
        next_token_log_probs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), temperature=0)


def test_half_precision_logits_are_scored_in_float32() -> None:
    hidden, head, ids = random_case(torch.bfloat16)
    assert score(hidden, head, ids).log_probs.dtype == torch.float32
