"""Packing leaks nothing: packed scores equal those of each chain alone, through real networks."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from domain.rollouts import Rollout, Segment, Status
from trainer.logprobs import next_token_log_probs, score
from trainer.objective import policy_loss
from trainer.packing import pack

VOCABULARY, WIDTH, T = 17, 24, 0.8


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(name: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "eos_token_id": 0, "bos_token_id": 0}
    config = {
        "gpt2": lambda: GPT2Config(  # type: ignore[no-untyped-call]
            n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, **sizes
        ),
        "llama": lambda: LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            **sizes,
        ),
    }[name]()
    built = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return built.eval()


NETWORKS = {name: network(name) for name in ("gpt2", "llama")}
chains = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=6,
)
quick = settings(max_examples=20)


def alone(model: Any, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of the ids in a row of their own; 0 for the first."""
    ids_1W = torch.tensor([list(ids)])
    logits = model(ids_1W, use_cache=False).logits
    return next_token_log_probs(logits, ids_1W, temperature=T)[0]


def packed_scores(model: Any, packed: dict[str, Tensor]) -> Tensor:
    hidden = model.base_model(
        input_ids=packed["input_ids"],
        position_ids=packed["positions"],
        attention_mask=None,
        use_cache=False,
    ).last_hidden_state
    head = model.get_output_embeddings()
    mask = packed["response_mask"]
    return score(hidden, head, packed["input_ids"], mask=mask, temperature=T, chunk=5).log_probs


def rollouts(model: Any, drawn: Sequence[tuple[list[int], list[int]]]) -> list[Rollout]:
    """One segment each, its log-probabilities from an exact engine."""
    found = []
    for sample, (prompt, sampled) in enumerate(drawn):
        logprobs = alone(model, [*prompt, *sampled])[len(prompt) :].tolist()
        segment = Segment(prompt, sampled, logprobs, "stop", 0)
        found.append(Rollout("t", 0, sample, 0, [segment], Status.COMPLETED, float(sample % 2)))
    return found


def tensors(batch: Sequence[Rollout]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in pack(batch, WIDTH).items()}


@pytest.mark.parametrize("name", NETWORKS)
@given(drawn=chains)
@quick
def test_at_lag_zero_packed_scores_are_the_samplers_and_every_weight_is_one(
    name: str, drawn: list[tuple[list[int], list[int]]]
) -> None:
    model = NETWORKS[name]
    with torch.no_grad():
        packed = tensors(rollouts(model, drawn))
        proximal = packed_scores(model, packed)
    _, metrics = policy_loss(
        proximal,
        proximal,
        packed["behavior_logprobs"],
        packed["advantages"],
        packed["response_mask"],
        importance=5.0,
    )
    assert metrics["mismatch/max"] < 1e-5
    assert metrics["mismatch/k3"] < 1e-9
    assert metrics["mismatch/ess"] == pytest.approx(1)
    assert metrics["mismatch/corrected"] == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_do_not_depend_on_how_chains_share_rows(name: str) -> None:
    model = NETWORKS[name]
    batch = rollouts(model, [([1, 2], [3, 4, 5]), ([6], [7]), ([1, 2], [8] * 7), ([9], [1, 2])])
    found = []
    for width in (9, WIDTH):
        arrays = pack(batch, width, estimator="mean")
        packed = {n: torch.from_numpy(a) for n, a in arrays.items()}
        current = packed_scores(model, packed)
        loss, _ = policy_loss(
            current,
            current.detach(),
            packed["behavior_logprobs"],
            packed["advantages"],
            packed["response_mask"],
        )
        found.append((loss.item(), torch.autograd.grad(loss, list(model.parameters()))))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_neighbour_in_the_row_changes_nothing(name: str) -> None:
    """A of 5, B of 1 sampled id, C of 7: C may say what it likes."""
    model = NETWORKS[name]
    told = []
    for c in ([1] * 6, [5, 4, 3, 2, 1, 0]):
        drawn = [([2, 3], [4, 5, 6]), ([7], [8]), ([9], c)]
        batch = rollouts(model, drawn)
        with torch.no_grad():
            packed = tensors(batch)
            scores = packed_scores(model, packed)
        assert len(scores) == 1
        told.append([scores[packed["rollout_index"] == i] for i in (0, 1)])
    for first, second in zip(*told, strict=True):
        assert torch.allclose(first, second, atol=1e-6)
