"""Any mix of requests, aborts and memory limits: each answer is exact, once, and leaves nothing.

May never happen: a request answered twice or not at all, ids or log-probabilities that depend on
who shared the batch, an abort that returns other ids than the whole answer begins with.
"""

import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from engine.batch import Batch
from engine.metrics import Metrics
from engine.policies import Policy
from engine.prefixes import Prefixes
from engine.refusals import PolicyFailed
from engine.requests import Completion, Request
from engine.sampling import SamplingParams
from engine.weights import build

TEXT = [(5 * k + k * k) % 16 for k in range(60)]
ROW = 2 * 2 * 16 * 4  # bytes of one position


@cache
def policy() -> Policy:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=96, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return build("r@1", "", Path(folder), tensors)


@cache
def alone(length: int, tokens: int, seed: int) -> tuple[int, ...]:
    """What a request samples in an engine of its own."""
    found: list[Completion | PolicyFailed] = []
    batch = Batch(policy(), prefixes=Prefixes(0), metrics=Metrics())
    batch.add(request("alone", length, tokens, seed, found))
    while batch.size:
        batch.step()
    assert isinstance(found[0], Completion)
    return tuple(found[0].token_ids)


def request(
    name: str, length: int, tokens: int, seed: int, found: list[Completion | PolicyFailed]
) -> Request:
    return Request(
        id=name,
        policy="r@1",
        prompt=tuple(TEXT[:length]),
        params=SamplingParams(max_tokens=tokens, seed=seed),
        deliver=found.append,
        arrived=0.0,
    )


REQUEST = st.tuples(
    st.integers(1, 60), st.integers(1, 40), st.integers(0, 3), st.integers(0, 30), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=8),
    memory=st.sampled_from([200 * ROW, 600 * ROW, 10**9]),
    retained=st.sampled_from([0, 40 * ROW, 10**9]),
)
def test_every_answer_is_exact_and_comes_once(
    asked: list[tuple[int, int, int, int, bool]], memory: int, retained: int
) -> None:
    answers: list[list[Completion | PolicyFailed]] = [[] for _ in asked]
    batch = Batch(
        policy(),
        prefixes=Prefixes(retained),
        metrics=Metrics(),
        room=lambda more: batch.slots.nbytes + more <= memory,
    )
    step = 0
    while step <= 30 or batch.size:
        for n, (length, tokens, seed, when, aborted) in enumerate(asked):
            if when == step:
                batch.add(request(str(n), length, tokens, seed, answers[n]))
            elif aborted and when + 7 == step:
                for stopped, partial in batch.remove(lambda r, n=n: r.id == str(n)):  # type: ignore[misc]
                    stopped.deliver(partial)
        batch.step()
        step += 1
        assert step < 3000
    assert batch.slots.nbytes == 0
    for (length, tokens, seed, _, aborted), found in zip(asked, answers, strict=True):
        (answer,) = found
        assert isinstance(answer, Completion)
        whole = alone(length, tokens, seed)
        sampled = tuple(answer.token_ids)
        assert sampled == whole[: len(sampled)]
        assert aborted or sampled == whole
        if sampled:
            scored = policy().score([*TEXT[:length], *sampled])[length - 1 :]
            assert (scored - torch.tensor(answer.logprobs)).abs().max() < 1e-4
