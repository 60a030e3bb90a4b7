"""Segments: bit-exact, once, under the right fence, and read back fast as the trainer needs them."""

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psycopg
import pytest

from domain.chains import merge
from domain.errors import Fenced, LedgerError
from domain.rollouts import Segment, Status
from storage import segments

Make = Callable[..., Any]


def append(b: Any, group: int, segment: Segment, **place: int) -> Any:
    at = {"seq": 0, "turn": 0, "chain": 0, "context_start": 0} | place
    return b.ledger.call(
        segments.append,
        b.run,
        group,
        0,
        0,
        b.attempt(group, 0)["fence"],
        segment,
        place=segments.Place(**at),
        engine="http://engine",
    )


def test_what_is_read_is_bit_for_bit_what_was_sampled(make: Make) -> None:
    b = make()
    b.serve(1)
    group = b.group()
    b.start(group, 0)
    bits = [0x80000001, 0xC1234567, 0x00000000, 0xBF7FFFFF, 0x80800000]  # denormal, -0.999…, 0.0
    logprobs = [struct.unpack("<f", struct.pack("<I", bit))[0] for bit in bits]
    sampled = [0, 1, 2**31 - 1, 5, 6]
    first = Segment([1, 2, 3], sampled, logprobs, "length", 0, ((0, 2), (1, 3)), kv_version=0)
    chain = [1, 2, 3, *sampled]
    second = Segment(
        [*chain, 9],
        [4],
        [-0.25],
        "stop",
        1,
        kv_version=0,
        cached_prompt_tokens=7,
        support=[[4, 8, 9]],
    )
    append(b, group, first)
    append(b, group, second, seq=1, turn=1, context_start=len(chain))
    append(b, group, Segment([3, 1], [], [], "abort", 1), seq=2, turn=2, chain=1)
    a, c, d = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert a.logprobs.astype("<f4").view("<u4").tolist() == bits
    assert (a.sampled_ids.tolist(), a.prompt_ids.tolist()) == (sampled, [1, 2, 3])
    assert (a.version, a.spans, a.newest_version) == (0, ((0, 2), (1, 3)), 1)
    assert (c.prompt_ids.tolist(), c.sampled_ids.tolist()) == ([*chain, 9], [4])
    assert [kept.tolist() for kept in c.support] == [[4, 8, 9]]
    assert (c.version, c.kv_version, c.cached_prompt_tokens) == (1, 0, 7)
    assert (d.prompt_ids.tolist(), len(d.sampled_ids), d.spans) == ([3, 1], 0, ())
    assert [list(x.ids) for x in merge([a, c, d])] == [[*chain, 9, 4]]
    row = b.attempt(group, 0)
    assert (row["policy_tokens"], row["env_tokens"], row["turns"]) == (6, 6, 3)
    assert (row["oldest_version"], row["newest_version"]) == (0, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_a_log_probability_that_is_no_number_is_refused(make: Make, value: float) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    with pytest.raises(LedgerError, match="log-probability of token 17"):
        b.sampled(group, 0, 20, logprobs=[-0.1] * 17 + [value] + [-0.1] * 2)
    assert b.ledger.call(segments.read, b.run, group, 0, 0) == []
    assert b.attempt(group, 0)["policy_tokens"] == 0


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([1], [2, -3], [-1.0, -1.0], "stop", 0), "token id -3 is negative"),
        (Segment([1], [2**31], [-1.0], "stop", 0), "32-bit"),
        (Segment([1], [2, 3], [-1.0], "stop", 0), "2 ids and 1 log-probabilities"),
        (Segment([1], [2], [-1.0], "stop", 0, support=[]), "1 ids and 0 kept sets"),
    ],
)
def test_impossible_answers_are_refused(make: Make, segment: Segment, message: str) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    with pytest.raises(LedgerError, match=message):
        append(b, group, segment)


def test_a_segment_delivered_three_times_counts_once(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    for _ in range(3):
        assert b.sampled(group, 0, seq=0) == segments.Progress()
    assert b.attempt(group, 0)["policy_tokens"] == 3
    b.sampled(group, 0, seq=1)
    assert b.attempt(group, 0)["policy_tokens"] == 6


def test_a_fenced_or_ended_execution_cannot_append(make: Make) -> None:
    b = make()
    group = b.group()
    old = b.start(group, 0).fence
    b.start(group, 0)
    segment = Segment([1], [2], [-1.0], "stop", 0)
    place = segments.Place(seq=0, turn=0, chain=0, context_start=0)
    with pytest.raises(Fenced, match="fence 1"):
        b.ledger.call(segments.append, b.run, group, 0, 0, old, segment, place=place, engine="e")
    append(b, group, segment)
    b.finish(group, 0)
    with pytest.raises(Fenced):
        b.sampled(group, 0)


def test_a_version_that_is_not_registered_is_refused(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    with pytest.raises(psycopg.errors.CheckViolation, match="not registered"):
        b.sampled(group, 0, version=9)


def test_a_cancel_is_seen_at_the_next_segment_which_stays_recorded(make: Make) -> None:
    b = make()
    group = b.group()
    b.start(group, 0)
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    assert b.sampled(group, 0).cancel_cause == "stale"
    assert b.attempt(group, 0)["policy_tokens"] == 3


def test_members_come_in_the_order_asked_by_sample(make: Make) -> None:
    b = make(groups={"size": 2})
    groups = [b.group() for _ in range(3)]
    for group in groups:
        b.rollout(group, 1, reward=0.25)
        b.start(group, 0)
        b.sampled(group, 0)
        b.sampled(group, 0, 2)
        b.finish(group, 0, None, status=Status.TRUNCATED, cause="turns")
        b.close(group)
    asked = [(groups[2], 0), (groups[0], 0)]
    read = b.ledger.call(segments.members, b.run, asked)
    assert [[m.group for m in part] for part in read] == [[2, 2], [0, 0]]
    first, second = read[0]
    assert (first.sample, first.task, first.status, first.cause) == (
        0,
        "t2",
        Status.TRUNCATED,
        "turns",
    )
    assert (second.sample, second.reward, second.policy_tokens) == (1, 0.25, 3)
    assert [len(s.prompt_ids) for s in first.segments] == [2, 7]
    assert first.segments[1].prompt_ids.dtype == np.int32
    with pytest.raises(LedgerError, match=r"no members of 1\.1"):
        b.ledger.call(segments.members, b.run, [(1, 1)])
    assert b.ledger.call(segments.members, b.run, []) == []


def test_a_step_of_two_million_tokens_is_read_in_two_queries(make: Make) -> None:
    b = make(groups={"size": 4})
    groups = [b.group() for _ in range(4)]
    for group in groups:
        for sample in range(4):
            b.start(group, sample)
            for _ in range(4):
                b.sampled(group, sample, 32_768, logprobs=np.full(32_768, -0.5, np.float32))
            b.finish(group, sample)
        b.close(group)
    began = time.perf_counter()
    parts = b.ledger.call(segments.members, b.run, [(group, 0) for group in groups])
    took = time.perf_counter() - began
    tokens = sum(member.policy_tokens for part in parts for member in part)
    assert tokens == 4 * 4 * 4 * 32_768
    assert took < 10  # measured 0.1 s: a generous bound, not a benchmark
    print(f"{tokens / took / 1e6:.0f} M tokens/s")  # noqa: T201
