"""What holds for the packed rows of any rollouts, against a slow and obvious packer."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.packing import rows_needed
from domain.rollouts import Rollout, Segment, Status
from trainer.members import judge, member_advantages
from trainer.packing import Packed, chain_lengths, pack

WIDTH = 40
ids = st.integers(0, 6)


@st.composite
def rollouts(draw: st.DrawFn, filtered: bool = False) -> list[Rollout]:
    """Groups whose members extend, rewrite or restart their histories."""
    found = []
    for index in range(draw(st.integers(0, 7))):
        segments: list[Segment] = []
        context: list[int] = []
        for _ in range(draw(st.integers(0, 4))):
            more = draw(st.lists(ids, max_size=4))
            histories: list[list[int]] = [context, context, context[:-1], []]
            kept = draw(st.sampled_from(histories))
            prompt = [*kept, *more] or [1]
            room = WIDTH - len(prompt)
            sampled = draw(st.lists(ids, max_size=min(4, room))) if room > 0 else []
            version = draw(st.integers(3, 5))
            cut = draw(st.integers(0, len(sampled)))
            spans = [(version, cut), (version + 1, len(sampled) - cut)]
            swapped = len(sampled) > 0 and draw(st.booleans())
            support = [sorted({v, *draw(st.lists(ids, max_size=2))}) for v in sampled]
            segments.append(
                Segment(
                    prompt[:WIDTH],
                    sampled,
                    [-0.1 * (i + 1) for i in range(len(sampled))],
                    "stop",
                    version,
                    version_spans=spans if swapped else None,
                    support=support if filtered and draw(st.booleans()) else None,
                )
            )
            context = [*prompt[:WIDTH], *sampled]
        status = draw(st.sampled_from(Status))
        scored = status in (Status.COMPLETED, Status.AGENT_ERROR, Status.TRUNCATED)
        reward = draw(st.sampled_from([0.0, 0.25, 1.0])) if scored else None
        cause = "tokens" if status is Status.TRUNCATED else None
        group = draw(st.integers(0, 2))
        found.append(Rollout(f"t{group}", group, index, 0, segments, status, reward, cause=cause))
    return found


@dataclass(frozen=True, order=True)
class Token:
    rollout: int
    id: int
    position: int
    trained: bool
    logprob: float
    version: int
    segment: int
    support: tuple[int, ...]


def obvious_chains(index: int, rollout: Rollout) -> list[list[Token]]:
    """Token by token, as the rule is written."""

    def context(token: int, position: int) -> Token:
        return Token(index, token, position, False, 0.0, -1, -1, ())

    chains: list[list[Token]] = []
    for number, segment in enumerate(rollout.segments):
        last = [token.id for token in chains[-1]] if chains else None
        prompt = list(segment.prompt_ids)
        if last is None or prompt[: len(last)] != last:
            chains.append([])
        chain = chains[-1]
        for token in prompt[len(chain) :]:
            chain.append(context(token, len(chain)))
        versions = [version for version, n in segment.spans for _ in range(n)]
        for i, token in enumerate(segment.sampled_ids):
            logprob = float(np.float32(segment.logprobs[i]))
            kept = tuple(segment.support[i]) if segment.support else ()
            chain.append(Token(index, token, len(chain), True, logprob, versions[i], number, kept))
    for chain in chains:
        while chain and not chain[-1].trained:
            chain.pop()
    return [chain for chain in chains if chain]


def read_chains(packed: Packed) -> list[list[Token]]:
    """The chains that the arrays describe."""
    chains = []
    for row in range(len(packed["input_ids"])):
        kept: dict[int, list[int]] = {}
        if "support_ids" in packed:
            for token, column in zip(
                packed["support_ids"][row], packed["support_columns"][row], strict=True
            ):
                if column >= 0:
                    kept.setdefault(int(column), []).append(int(token))
        segments = packed["segment_ids"][row]
        for number in range(1, int(segments.max(initial=0)) + 1):
            columns = np.flatnonzero(segments == number)
            assert (np.diff(columns) == 1).all()
            chains.append(
                [
                    Token(
                        int(packed["rollout_index"][row, c]),
                        int(packed["input_ids"][row, c]),
                        int(packed["positions"][row, c]),
                        bool(packed["response_mask"][row, c]),
                        float(packed["behavior_logprobs"][row, c]),
                        int(packed["versions"][row, c]),
                        int(packed["segment_index"][row, c]),
                        tuple(kept.get(int(c), ())),
                    )
                    for c in columns
                ]
            )
    return chains


@given(rollouts(filtered=True), st.sampled_from(["mask", "score", "zero", "drop"]))
def test_rows_hold_every_chain_whole_and_every_sampled_id_once(
    batch: list[Rollout], truncation: str
) -> None:
    policy: dict[str, str] = {"truncation": truncation}
    members = judge(batch, **policy)  # type: ignore[arg-type]
    expected = [
        chain
        for index, (rollout, member) in enumerate(zip(batch, members, strict=True))
        if member.trains
        for chain in obvious_chains(index, rollout)
    ]
    packed = pack(batch, WIDTH, support_capacity=WIDTH * 3, **policy)  # type: ignore[arg-type]
    assert sorted(read_chains(packed)) == sorted(expected)
    lengths = chain_lengths(batch, WIDTH, **policy)  # type: ignore[arg-type]
    assert lengths == [len(chain) for chain in expected]
    assert len(packed["input_ids"]) == rows_needed(lengths, WIDTH)
    values = np.array(member_advantages(batch, members), dtype=np.float32)
    used = packed["segment_ids"] > 0
    assert (packed["advantages"][used] == values[packed["rollout_index"][used]]).all()
    for name, fill in (("input_ids", 0), ("positions", 0), ("rollout_index", -1), ("versions", -1)):
        assert (packed[name][~used] == fill).all()


@given(rollouts())
def test_rollout_weights_count_each_rollout_once(batch: list[Rollout]) -> None:
    packed = pack(batch, WIDTH, truncation="score")
    mask = packed["response_mask"]
    trained = set(packed["rollout_index"][mask].tolist())
    assert packed["rollout_weights"].sum() == pytest.approx(len(trained), abs=1e-5)
    for rollout in trained:
        mine = mask & (packed["rollout_index"] == rollout)
        assert packed["rollout_weights"][mine].sum() == pytest.approx(1, abs=1e-5)


@given(rollouts(), st.randoms(use_true_random=False))
def test_the_order_of_groups_changes_no_rollout(batch: list[Rollout], random: Random) -> None:
    shuffled = list(batch)
    random.shuffle(shuffled)

    def by_sample(order: list[Rollout]) -> dict[int, list[tuple[float, ...]]]:
        packed = pack(order, WIDTH, truncation="zero")
        told: dict[int, list[tuple[float, ...]]] = {}
        for row, column in np.argwhere(packed["segment_ids"] > 0):
            sample = order[packed["rollout_index"][row, column]].sample
            names = ("input_ids", "positions", "response_mask", "versions", "rollout_weights")
            told.setdefault(sample, []).append(
                (
                    *(float(packed[name][row, column]) for name in names),
                    round(float(packed["advantages"][row, column]), 5),
                )
            )
        return {sample: sorted(tokens) for sample, tokens in told.items()}

    assert by_sample(batch) == by_sample(shuffled)


@given(rollouts(), st.integers(0, 3), st.integers(6, 8))
def test_no_token_beyond_the_bound_trains_and_no_younger_one_is_lost(
    batch: list[Rollout], bound: int, current: int
) -> None:
    packed = pack(
        batch, WIDTH, trainer_version=current, max_lag=bound, stale_policy="mask_span"
    )  # fmt: skip
    whole = pack(batch, WIDTH)
    young = whole["response_mask"] & (current - whole["versions"] <= bound)
    assert np.count_nonzero(packed["response_mask"]) == np.count_nonzero(young)
    assert (current - packed["versions"][packed["response_mask"]] <= bound).all()
    assert len(packed["input_ids"]) <= len(whole["input_ids"])


@given(rollouts(), st.randoms(use_true_random=False))
def test_rows_needed_depends_on_the_lengths_alone(batch: list[Rollout], random: Random) -> None:
    lengths = chain_lengths(batch, WIDTH)
    shuffled = list(lengths)
    random.shuffle(shuffled)
    assert rows_needed(shuffled, WIDTH) == rows_needed(lengths, WIDTH)
