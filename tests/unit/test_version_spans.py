"""What an engine says about versions and KV is believed only within what the request allowed."""

from typing import Any

import pytest

from activities.answers import Generated, SamplingParams, generated
from domain.errors import EngineRefused, WrongVersion

SHA = "aa"


def answer(
    spans: list[tuple[int, int]] | None, kv: int | None, *, tokens: int = 6, sha: str = SHA
) -> dict[str, Any]:
    ends = [0]
    for _, count in spans or []:
        ends.append(ends[-1] + count)
    labels = [
        {"version": str(version), "start": start, "end": end}
        for (version, _), start, end in zip(spans or [], ends[:-1], ends[1:], strict=True)
    ]
    ids = list(range(tokens))
    return {
        "weights_sha256": sha,
        "choices": [
            {
                "finish_reason": "length",
                "token_ids": ids,
                "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
                "weight_versions": labels,
                "kv_version": kv,
            }
        ],
    }


def read(body: dict[str, Any], **params: Any) -> Generated:
    asked = SamplingParams(max_tokens=6, seed=0, **params)
    return generated("http://e", "r@4", asked, SHA, body)


def test_a_swap_under_a_request_is_recorded_span_by_span() -> None:
    found = read(answer([(4, 2), (5, 4)], 4, sha="bb"), swap_kv_bound=1)
    assert found.spans == ((4, 2), (5, 4))
    assert found.kv_version == 4


def test_one_version_per_request_unless_a_swap_was_allowed() -> None:
    with pytest.raises(WrongVersion, match=r"sampled r@4 with versions \(\(4, 2\), \(5, 4\)\)"):
        read(answer([(4, 2), (5, 4)], 4))
    with pytest.raises(WrongVersion, match="with weights bb"):
        read(answer([(4, 6)], 4, sha="bb"), swap_kv_bound=1)


@pytest.mark.parametrize(
    "spans", [[(3, 2), (4, 4)], [(5, 2), (4, 4)], [(4, 2), (4, 4)]], ids=["older", "back", "same"]
)
def test_versions_inside_a_request_only_grow(spans: list[tuple[int, int]]) -> None:
    if spans == [(4, 2), (4, 4)]:
        assert read(answer(spans, 4)).spans == ((4, 2), (4, 4))
        return
    with pytest.raises(WrongVersion):
        read(answer(spans, 4), swap_kv_bound=9)


def test_spans_must_cover_the_sampled_ids() -> None:
    with pytest.raises(EngineRefused, match="version spans"):
        read(answer([(4, 2), (5, 3)], 4), swap_kv_bound=1)


@pytest.mark.parametrize(
    ("spans", "kv", "asked", "swap", "holds"),
    [
        ([(4, 6)], 4, 0, None, True),
        ([(4, 6)], 3, 0, None, False),
        ([(4, 6)], 3, 1, 1, True),
        ([(4, 6)], 2, 1, 1, False),
        ([(4, 6)], 3, 0, 1, False),  # the ledger allowed no older KV for this request
        ([(4, 6)], 5, 1, 1, False),  # KV newer than the weights
        ([(4, 1), (5, 5)], 4, 0, 1, True),
        ([(4, 1), (6, 5)], 4, 0, 1, False),
        ([(4, 1), (5, 5)], 3, 1, 1, False),
        ([(4, 1), (5, 5)], None, 0, 1, False),  # provenance is missing
    ],
)
def test_the_kv_bound_holds_for_the_newest_version_that_sampled(
    spans: list[tuple[int, int]], kv: int | None, asked: int, swap: int | None, holds: bool
) -> None:
    body = answer(spans, kv)
    if holds:
        assert read(body, kv_max_staleness=asked, swap_kv_bound=swap).kv_version == kv
    else:
        with pytest.raises(WrongVersion, match="KV"):
            read(body, kv_max_staleness=asked, swap_kv_bound=swap)
