"""What an engine says filtered sampling kept is believed only if it can be scored."""

from typing import Any

import pytest

from activities.answers import Generated, SamplingParams, generated
from domain.errors import EngineRefused


def read(kept: list[list[int]] | None) -> Generated:
    choice: dict[str, Any] = {
        "finish_reason": "length",
        "token_ids": [3, 4],
        "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in (3, 4)]},
    }
    if kept is not None:
        choice["sampling_mask"] = kept
    asked = SamplingParams(max_tokens=2, seed=0, top_k=2)
    return generated("http://e", "r@4", asked, None, {"choices": [choice]})


def test_ids_that_tie_with_the_last_of_top_k_are_kept_as_the_engine_says() -> None:
    assert read([[3, 5, 9], [8, 4]]).support == ((3, 5, 9), (8, 4))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "filtered without reporting the kept ids"),
        ([[3]], "filtered without reporting the kept ids"),
        ([[3], [5, 6]], "kept set of id 4 at 1 must hold it"),
        ([[3, 5, 5], [4]], "kept set of id 3 at 0 must hold it, and no id twice"),
    ],
)
def test_a_kept_set_that_cannot_be_scored_is_refused(
    kept: list[list[int]] | None, message: str
) -> None:
    with pytest.raises(EngineRefused, match=message):
        read(kept)
