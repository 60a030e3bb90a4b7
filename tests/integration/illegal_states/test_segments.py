"""What may be written down as sampled."""

import pytest

from storage.database import Ledger
from tests.telling_moment import accepted, numbered, refused, segment

ILLEGAL = [
    ("not running under this fence", segment(sample="1")),
    ("not running under this fence", segment(fence="0")),
    ("version that is not registered", segment(newest_version="2", version_spans="'{1,1,2,1}'")),
    ("does not extend its chain", segment(context_start="2")),
    ("does not extend its chain", segment() + segment(seq="1", context_start="4")),
    ("does not extend its chain", segment() + segment(seq="1", chain="1", context_start="3")),
    ("lengths", segment(tokens="3", version_spans="'{1,3}'")),
    ("lengths", segment(logprobs="'\\x00000000'")),
    ("spans", segment(version_spans="'{1,1}'")),
    ("spans", segment(version_spans="'{0,2}'")),
    ("spans", segment(version_spans="'{1}'")),
    ("spans", segment(oldest_version="1", newest_version="0", version_spans="'{1,2}'")),
    (
        "spans",
        segment(
            kv_version="1", oldest_version="0", newest_version="0", version_spans="'{0,2}'"
        ),
    ),
    ("cached", segment(cached_prompt_tokens="2")),
    ("starts_with_prompt", segment(prompt_tokens="0", prompt_delta="''")),
    *(
        (f'null value in column "{array}"', segment(**{array: "NULL"}))
        for array in ("prompt_delta", "sampled_ids", "logprobs")
    ),
    ("support", segment(support_ids="'\\x01000000'")),
    ("support", segment(support_ids="'\\x01000000'", support_counts="'\\x01000000'")),
]  # fmt: skip

LEGAL = [
    segment(),
    segment() + segment(seq="1", turn="1", context_start="3"),
    segment() + segment(seq="1", turn="1", context_start="3", prompt_tokens="0", prompt_delta="''"),
    segment() + segment(seq="1", turn="1", chain="1"),
    segment(oldest_version="0", version_spans="'{0,1,1,1}'", kv_version="0"),
    segment(tokens="0", sampled_ids="''", logprobs="''", version_spans="'{}'"),
    segment(support_ids="'\\x01000000'", support_counts="'\\x0100000000000000'"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
