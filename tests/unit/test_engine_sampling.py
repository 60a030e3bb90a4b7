"""Filters, processed log-probabilities and draws (vectors of the sampling maths)."""

import math

import numpy as np
import pytest
import torch

from engine.sampling import SamplingParams, Settings, Uniforms, draw

PROBS = [0.4, 0.3, 0.2, 0.08, 0.02]


def one(logits: list[float], u: float, **params: float) -> tuple[int, float, list[int] | None]:
    settings = Settings.of([SamplingParams.model_validate(params)])
    ids, logprobs, supports = draw(torch.tensor([logits]), settings, [u])
    return ids[0], logprobs[0], supports.get(0)


LOGITS = [math.log(p) for p in PROBS]
MIDDLE = 0.5 / 0.9  # falls on id 1 when {0, 1, 2} or more is kept


@pytest.mark.parametrize(
    ("params", "u", "support", "logprob"),
    [
        ({}, 0.5, None, -1.203973),
        ({"top_p": 0.8}, MIDDLE, [0, 1, 2], -1.098612),
        ({"top_k": 2}, 0.9, [0, 1], -0.847298),
        ({"min_p": 0.3}, MIDDLE, [0, 1, 2], -1.098612),
        ({"temperature": 0.5, "top_p": 0.8}, 0.9, [0, 1], -1.021651),
    ],
)
def test_processed_logprob_is_of_the_distribution_sampled_from(
    params: dict[str, float], u: float, support: list[int] | None, logprob: float
) -> None:
    token, found, kept = one(LOGITS, u, **params)
    assert token == 1
    assert kept == support
    assert found == pytest.approx(logprob, abs=1e-6)


def test_temperature_comes_before_the_filters() -> None:
    at_half = [one(LOGITS, u, temperature=0.5)[1] for u in (0.1, 0.6, 0.9, 0.995, 0.9999)]
    expected = [0.539084, 0.303235, 0.134771, 0.021563, 0.001348]
    assert np.exp(at_half) == pytest.approx(expected, abs=1e-6)


def test_recorded_support_gives_the_logprob() -> None:
    token, logprob, kept = one([2.0, 0.5, 1.0, -1.0, 0.0], 0.95, top_k=3)
    assert kept == [0, 1, 2]
    assert token == 2
    scores = torch.tensor([2.0, 0.5, 1.0])
    assert logprob == pytest.approx(float(scores.log_softmax(0)[2]), abs=1e-6)


def test_greedy_takes_the_likeliest_with_certainty() -> None:
    assert one(LOGITS, 0.999, temperature=0) == (0, 0.0, [0])


def test_a_kept_set_never_exceeds_top_k_however_many_tie() -> None:
    """The room of a packed row is `top_k` ids a token; ties beyond it would stop the run."""
    _, logprob, kept = one([1.0, 1.0, 1.0, 0.0], 0.5, top_k=2)
    assert kept == [1, 2]
    assert logprob == pytest.approx(math.log(0.5))
    assert one([1.0] * 8, 0.5, top_k=3, top_p=0.9)[2] == [5, 6, 7]


def test_top_p_keeps_at_least_the_likeliest() -> None:
    assert one(LOGITS, 0.7, top_p=1e-9)[::2] == (0, [0])


def test_rows_with_and_without_filters_do_not_disturb_each_other() -> None:
    params = [
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(temperature=0.5, top_p=0.8),
        SamplingParams(temperature=0),
    ]
    uniforms = [0.5, 0.9, 0.9, 0.9]
    together = draw(torch.tensor([LOGITS] * 4), Settings.of(params), uniforms)
    for row, (p, u) in enumerate(zip(params, uniforms, strict=True)):
        ids, logprobs, supports = draw(torch.tensor([LOGITS]), Settings.of([p]), [u])
        assert (ids[0], logprobs[0]) == (together[0][row], together[1][row])
        assert supports.get(0) == together[2].get(row)


def test_an_id_of_probability_zero_is_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    drawn = {one(logits, u)[0] for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53)}
    assert drawn == {1, 3}


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    stream = Uniforms(3)
    settings = Settings.of([SamplingParams()] * count)
    ids, _, _ = draw(
        torch.tensor([LOGITS]).expand(count, -1), settings, [stream.next() for _ in range(count)]
    )
    share = np.bincount(ids, minlength=5) / count
    sigma = np.sqrt(np.array(PROBS) * (1 - np.array(PROBS)) / count)
    assert (np.abs(share - PROBS) < 4.5 * sigma).all()


def test_nan_logits_give_a_nan_logprob() -> None:
    for params in ({}, {"top_k": 2}, {"temperature": 0}):
        assert not math.isfinite(one([math.nan, 0.0, 1.0], 0.5, **params)[1])


def test_streams_are_independent_and_repeat() -> None:
    first, again, other = Uniforms(7), Uniforms(7), Uniforms(8)
    a, b, c = ([s.next() for _ in range(200)] for s in (first, again, other))
    assert a == b
    assert not set(a) & set(c)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"min_p": 1},
        {"top_k": -2},
        {"max_tokens": 0},
        {"n": 2},
        {"logprobs": 5},
        {"presence_penalty": 0.5},
        {"seed": True},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"sampling_params.{next(iter(wrong))}"):
        SamplingParams.parse(wrong)
