"""Packing: the worked example, the cut rule's row counts, supports, age, and what is refused."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from domain.rollouts import Rollout, Segment, Status
from tests.rehearsal import configuration
from trainer.batch import Batch
from trainer.objective import usable_gradient
from trainer.packing import chain_lengths, pack, rows_needed


def segment(
    prompt: Sequence[int],
    sampled: Sequence[int],
    version: int = 3,
    logprobs: Sequence[float] | None = None,
    *,
    spans: Sequence[tuple[int, int]] | None = None,
    support: Sequence[Sequence[int]] | None = None,
) -> Segment:
    logprobs = [-0.5] * len(sampled) if logprobs is None else logprobs
    return Segment(prompt, sampled, logprobs, "stop", version, version_spans=spans, support=support)


def rollout(
    sample: int,
    segments: Sequence[Segment],
    reward: float | None = 1.0,
    status: Status = Status.COMPLETED,
    *,
    group: int = 0,
) -> Rollout:
    cause = "tokens" if status is Status.TRUNCATED else None
    return Rollout(f"t{group}", group, sample, 0, segments, status, reward, cause=cause)


WORKED = [
    rollout(
        0,
        [
            segment([1, 2, 3], [4, 5], 3, [-0.14, -0.25]),
            segment([1, 2, 3, 4, 5, 9, 9], [6, 7], 4, [-0.16, -0.27]),
        ],
        1.0,
    ),
    rollout(
        1,
        [
            segment([1, 2, 3], [8, 5], 3, [-0.18, -0.25]),
            segment([1, 2, 3, 8, 7], [6], 4, [-0.16]),
        ],
        0.0,
    ),
    rollout(2, [segment([1, 2, 3], [4], 3, [-0.14])], 0.5, Status.TRUNCATED),
    rollout(3, [segment([1, 2, 3], [7, 7, 7], 4, [-0.17, -0.27, -0.37])], 0.25, Status.AGENT_ERROR),
]


def on_mask(packed: dict[str, np.ndarray], name: str) -> list[list[float]]:
    return [
        [round(float(x), 4) for x in values[mask]]
        for values, mask in zip(packed[name], packed["response_mask"], strict=True)
    ]


def test_the_worked_example() -> None:
    packed = pack(WORKED, 12, rows=4, estimator="mean")
    assert chain_lengths(WORKED, 12) == [9, 5, 6, 6]
    assert packed["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 9, 9, 6, 7, 0, 0, 0],
        [1, 2, 3, 8, 7, 6, 1, 2, 3, 7, 7, 7],
        [1, 2, 3, 8, 5, 0, 0, 0, 0, 0, 0, 0],
        [0] * 12,
    ]
    assert packed["segment_ids"].tolist() == [
        [1] * 9 + [0] * 3,
        [1] * 6 + [2] * 6,
        [1] * 5 + [0] * 7,
        [0] * 12,
    ]
    assert packed["positions"].tolist() == [
        [*range(9), 0, 0, 0],
        [*range(6), *range(6)],
        [*range(5), *[0] * 7],
        [0] * 12,
    ]
    assert packed["response_mask"].astype(int).tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0] * 12,
    ]
    assert on_mask(packed, "behavior_logprobs") == [
        [-0.14, -0.25, -0.16, -0.27],
        [-0.16, -0.17, -0.27, -0.37],
        [-0.18, -0.25],
        [],
    ]
    assert on_mask(packed, "versions") == [[3, 3, 4, 4], [4, 4, 4, 4], [3, 3], []]
    assert on_mask(packed, "segment_index") == [[0, 0, 1, 1], [1, 0, 0, 0], [0, 0], []]
    assert packed["rollout_index"].tolist() == [
        [0] * 9 + [-1] * 3,
        [1] * 6 + [3] * 6,
        [1] * 5 + [-1] * 7,
        [-1] * 12,
    ]
    third = 0.33333
    assert packed["advantages"] == pytest.approx(
        np.array(
            [
                [0.58333] * 9 + [0] * 3,
                [-0.41667] * 6 + [-0.16667] * 6,
                [-0.41667] * 5 + [0] * 7,
                [0] * 12,
            ]
        ),
        abs=1e-5,
    )
    assert np.array(on_mask(packed, "rollout_weights")[0]) == pytest.approx([0.25] * 4)
    assert on_mask(packed, "rollout_weights")[1] == pytest.approx([third] * 4, abs=1e-4)
    assert on_mask(packed, "rollout_weights")[2] == pytest.approx([third] * 2, abs=1e-4)
    off = ~packed["response_mask"]
    assert (packed["behavior_logprobs"][off] == 0).all()
    assert (packed["versions"][off] == -1).all()
    assert (packed["segment_index"][off] == -1).all()
    assert (packed["rollout_weights"][off] == 0).all()
    assert (packed["segment_ids"] > 0).mean() == pytest.approx(26 / 48)


@pytest.mark.parametrize("truncation", ["score", "zero"])
def test_the_worked_example_with_its_truncated_member_in(truncation: str) -> None:
    packed = pack(WORKED, 12, rows=4, estimator="mean", truncation=truncation)  # type: ignore[arg-type]
    assert chain_lengths(WORKED, 12, truncation=truncation) == [9, 5, 6, 4, 6]  # type: ignore[arg-type]
    assert packed["input_ids"][2].tolist() == [1, 2, 3, 8, 5, 1, 2, 3, 4, 0, 0, 0]
    assert packed["rollout_weights"][2, 8] == 1
    assert (packed["segment_ids"] > 0).mean() == pytest.approx(0.625)


def test_arrays_and_lists_pack_alike() -> None:
    as_arrays = [
        dataclasses.replace(
            r,
            segments=[
                dataclasses.replace(
                    s,
                    prompt_ids=np.array(s.prompt_ids, dtype=np.int32),
                    sampled_ids=np.array(s.sampled_ids, dtype=np.int32),
                    logprobs=np.array(s.logprobs, dtype=np.float32),
                )
                for s in r.segments
            ],
        )
        for r in WORKED
    ]
    lists, arrays = pack(WORKED, 12), pack(as_arrays, 12)
    for name, values in lists.items():
        assert (values == arrays[name]).all(), name


def test_first_fit_decreasing_is_stable() -> None:
    lengths = [5, 7, 3, 7, 2, 4]
    rollouts = [rollout(i, [segment(range(1, n), [99])]) for i, n in enumerate(lengths)]
    packed = pack(rollouts, 10)
    assert [
        [int(row[segments == k][0]) for k in range(1, segments.max() + 1)]
        for row, segments in zip(packed["rollout_index"], packed["segment_ids"], strict=True)
    ] == [[1, 2], [3, 4], [0, 5]]


@pytest.mark.parametrize(
    ("admitted", "new", "need", "fits"),
    [
        ([6, 6], [5, 5], 3, False),
        ([6, 6], [4, 4], 2, True),
        ([6, 4], [10], 2, True),
        ([9, 9], [2, 2], 3, True),
        ([9, 9], [2, 9], 4, False),
        ([3, 3, 3], [3, 3, 3], 2, True),
    ],
)
def test_the_cut_rule_counts_rows(
    admitted: list[int], new: list[int], need: int, fits: bool
) -> None:
    rows = 3 if admitted == [9, 9] else 2
    assert rows_needed([*admitted, *new], 10) == need
    assert (need <= rows) is fits


def test_a_row_never_overflows_and_more_rows_than_given_are_refused() -> None:
    rollouts = [rollout(i, [segment(range(1, n), [9])]) for i, n in enumerate([40, 30, 64])]
    assert len(pack(rollouts, 64)["input_ids"]) == 3
    with pytest.raises(ValueError, match="3 chains need 3 rows of 64 tokens, not 2"):
        pack(rollouts, 64, rows=2)
    with pytest.raises(
        ValueError, match="sample 2 has a chain of 64 tokens, wider than a row of 63"
    ):
        pack(rollouts, 63)


def test_no_token_of_a_failed_rollout_is_trained() -> None:
    rollouts = [
        rollout(0, [segment([1], [2])], 1.0),
        rollout(1, [segment([1], [3])], 0.0),
        rollout(2, [segment([1], [4, 4, 4])], None, Status.INFRA_ERROR),
        rollout(3, [segment([1], [5, 5, 5])], None, Status.CANCELLED),
    ]
    packed = pack(rollouts, 8)
    assert set(packed["rollout_index"].ravel().tolist()) == {0, 1, -1}
    assert packed["response_mask"].sum() == 2


def test_tool_output_is_context_and_the_reward_reaches_the_last_model_token() -> None:
    tool_output = [7] * 2000
    ends_with_tool = rollout(
        0, [segment([1, 2], [3]), segment([1, 2, 3, *tool_output], [4]), segment([9], [])]
    )
    packed = pack([ends_with_tool, rollout(1, [segment([1, 2], [5])], 0.0)], 2004, estimator="mean")
    row = packed["input_ids"][0]
    assert packed["response_mask"][0].sum() == 2
    assert row[packed["response_mask"][0]].tolist() == [3, 4]
    assert packed["advantages"][0][packed["response_mask"][0]].tolist() == [0.5, 0.5]


def test_a_rewritten_history_starts_a_new_chain_and_trains_each_id_once() -> None:
    rewritten = rollout(0, [segment([1, 2], [3, 4]), segment([1, 9, 3, 4, 5], [6])])
    packed = pack([rewritten, rollout(1, [segment([1], [8])], 0.0)], 16)
    mine = packed["rollout_index"] == 0
    assert sorted(packed["input_ids"][mine & packed["response_mask"]].tolist()) == [3, 4, 6]
    assert chain_lengths([rewritten], 16) == [4, 6]


def test_padding_is_not_trained_even_if_the_pad_id_was_sampled() -> None:
    packed = pack([rollout(0, [segment([5], [0])]), rollout(1, [segment([5], [6])], 0.0)], 8)
    assert packed["response_mask"].sum() == 2
    assert not packed["response_mask"][packed["segment_ids"] == 0].any()


# Filtered sampling

FILTERED = [
    rollout(0, [segment([1, 2], [3, 4], support=[(3, 5), (4,)])], 1.0),
    rollout(1, [segment([1, 2], [6], support=[(2, 6, 9)])], 0.0),
]


def test_kept_ids_lie_back_to_back_in_row_order() -> None:
    packed = pack(FILTERED, 8, support_capacity=8)
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 1, 2, 6, 0]]
    assert packed["support_ids"].tolist() == [[3, 5, 4, 2, 6, 9, -1, -1]]
    assert packed["support_columns"].tolist() == [[2, 2, 3, 6, 6, 6, -1, -1]]
    assert packed["support_ids"].dtype == packed["support_columns"].dtype == np.int32


def test_supports_without_room_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match="set support_capacity"):
        pack(FILTERED, 8)
    with pytest.raises(ValueError, match="row 0 holds 6 kept ids"):
        pack(FILTERED, 8, support_capacity=5)


def test_more_ids_that_tie_than_a_row_has_room_for_widen_it() -> None:
    roomy = pack(FILTERED, 8, support_capacity=6)
    tied = pack(FILTERED, 8, support_capacity=5, support_grows=True)
    assert all((roomy[name] == tied[name]).all() for name in roomy)
    assert pack(FILTERED, 8, support_capacity=7, support_grows=True)["support_ids"].shape == (1, 7)
    with pytest.raises(ValueError, match="set support_capacity"):
        pack(FILTERED, 8, support_grows=True)


def test_ties_at_the_last_place_of_top_k_stop_no_run() -> None:
    config = configuration(
        sampling={"top_k": 2},
        trainer={"width": 8, "support_capacity": 16},
        budget={"max_generated_tokens": 7, "segment_tokens": 7, "max_context_tokens": 8},
    )
    tied = [(token, 8, 9) for token in range(7)]
    group = [
        rollout(sample, [segment([1], list(range(7)), support=tied)], float(sample))
        for sample in range(2)
    ]
    packed = Batch(groups=[group]).pack(config, 4)
    assert ((packed["support_ids"] >= 0).sum(axis=1)[:2] == 21).all()


@pytest.mark.parametrize("kept", [[(5, 9), (4,)], [(3, 3), (4,)], [(3,), (5, 6)]])
def test_a_sampled_id_outside_its_kept_set_is_refused(kept: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="must be distinct and hold the sampled id"):
        pack([rollout(0, [segment([1], [3, 4], support=kept)])], 8, support_capacity=8)


def test_an_id_without_a_kept_set_came_from_the_whole_vocabulary() -> None:
    mixed = rollout(0, [segment([1], [3, 4], support=[(), (4, 8)])])
    packed = pack([mixed, rollout(1, [segment([1], [2])], 0.0)], 5, support_capacity=3)
    assert packed["support_ids"].tolist() == [[4, 8, -1]]
    assert packed["support_columns"].tolist() == [[2, 2, -1]]


@pytest.mark.parametrize(
    "broken",
    [
        segment([1], [2, 3], logprobs=[-0.5]),
        segment([1], [2, 3], spans=[(3, 1)]),
        segment([1], [2, 3], support=[(2,)]),
    ],
)
def test_a_segment_whose_parts_disagree_is_refused(broken: Segment) -> None:
    with pytest.raises(ValueError, match="segment 0: 2 sampled ids"):
        pack([rollout(0, [broken])], 8, support_capacity=8)


def test_a_log_probability_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0 has a log-probability that is not finite"):
        pack([rollout(0, [segment([1], [2], logprobs=[float("nan")])])], 8)


# Age at training: `mask_span`


def spans_rollout(versions: Sequence[int], sample: int = 0, reward: float = 1.0) -> Rollout:
    """One segment per version, two sampled ids each, with an environment token in between."""
    segments, context = [], [1]
    for version in versions:
        sampled = [version, version]
        segments.append(segment(list(context), sampled, version))
        context += [*sampled, 50]
    return rollout(sample, segments, reward)


@pytest.mark.parametrize(
    ("name", "versions", "bound", "current", "trainable"),
    [
        ("M1", [10, 11, 12], 2, 12, [10, 11, 12]),
        ("M2", [10, 11, 12], 2, 13, [11, 12]),
        ("M3", [10, 11, 12], 2, 14, [12]),
        ("M4", [10, 11, 12], 2, 15, []),
        ("M5", [10, 10, 10], 2, 12, [10, 10, 10]),
        ("M6", [10, 10, 10], 2, 13, []),
        ("M7", [10, 12], 1, 12, [12]),
        ("M9", [12, 12], 0, 12, [12, 12]),
        ("M10", [11, 12], 0, 12, [12]),
    ],
)
def test_old_spans_leave_the_loss_and_stay_as_context(
    name: str, versions: list[int], bound: int, current: int, trainable: list[int]
) -> None:
    young = rollout(1, [segment([1], [7], current)], 0.0)
    packed = pack(
        [spans_rollout(versions), young],
        16,
        estimator="mean",
        trainer_version=current,
        max_lag=bound,
        stale_policy="mask_span",
    )
    mine = packed["rollout_index"] == 0
    mask = mine & packed["response_mask"]
    assert packed["versions"][mask].tolist() == [v for v in trainable for _ in range(2)], name
    if trainable:
        assert mine.sum() == 1 + 2 * len(versions) + len(versions) - 1  # all of it is context
        assert packed["rollout_weights"][mask] == pytest.approx(1 / (2 * len(trainable)))
        assert (packed["rollout_weights"][~packed["response_mask"]] == 0).all()
        assert packed["advantages"][mask] == pytest.approx(0.5)  # the baseline saw both members
    else:
        assert not mine.any()
    assert packed["advantages"][packed["rollout_index"] == 1] == pytest.approx(-0.5)


def test_m8_two_spans_in_one_turn_are_masked_apart() -> None:
    m8 = rollout(0, [segment([1], [2, 3, 4, 5], 10, spans=[(10, 2), (11, 2)])])
    packed = pack([m8], 8, trainer_version=12, max_lag=1, stale_policy="mask_span")
    assert packed["response_mask"].astype(int).tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]
    assert packed["versions"][0, 1:5].tolist() == [10, 10, 11, 11]


def test_kept_sets_of_old_tokens_take_no_room() -> None:
    spans, kept = [(10, 1), (12, 1)], [(2, 5, 6), (3, 7)]
    half_old = rollout(0, [segment([1], [2, 3], 10, spans=spans, support=kept)])
    packed = pack(
        [half_old], 4, support_capacity=2, trainer_version=12, max_lag=1, stale_policy="mask_span"
    )
    assert packed["support_ids"].tolist() == [[3, 7]]
    assert packed["support_columns"].tolist() == [[2, 2]]


def test_m11_a_batch_of_old_spans_only_makes_no_update() -> None:
    m11 = [spans_rollout([10, 10], 0, 1.0), spans_rollout([10, 10], 1, 0.0)]
    packed = pack(m11, 16, rows=2, trainer_version=13, max_lag=2, stale_policy="mask_span")
    assert not packed["response_mask"].any()
    assert not usable_gradient(packed, kl=0.1, entropy=0.1)


def test_m11b_tokens_without_advantage_make_an_update_only_with_kl_or_entropy() -> None:
    m11b = pack([spans_rollout([12], 0), spans_rollout([12], 1)], 16)
    assert m11b["response_mask"].any()
    assert not usable_gradient(m11b)
    assert usable_gradient(m11b, kl=0.1)
    assert usable_gradient(m11b, entropy=0.1)
    assert usable_gradient(pack([spans_rollout([12], 0), spans_rollout([12], 1, 0.0)], 16))


def test_m12_one_share_of_two_without_tokens_leaves_the_update_to_the_other() -> None:
    m12 = [
        pack([spans_rollout([v], 0), spans_rollout([v], 1, 0.0)], 16, rows=1, trainer_version=13,
             max_lag=2, stale_policy="mask_span")
        for v in (10, 13)
    ]  # fmt: skip
    assert [usable_gradient(share) for share in m12] == [False, True]


@pytest.mark.parametrize("policy", ["mask_span", "wait", "resubmit", "keep"])
def test_m13_a_token_newer_than_the_trainer_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"version 13 is newer than the trainer's 12"):
        pack([spans_rollout([13])], 8, trainer_version=12, max_lag=2, stale_policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["wait", "resubmit"])
def test_policies_that_promise_the_bound_never_train_beyond_it(policy: str) -> None:
    with pytest.raises(ValueError, match="may never train them"):
        pack([spans_rollout([9])], 8, trainer_version=12, max_lag=2, stale_policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, 2, 3, 20])
def test_k1_to_k4_keep_trains_every_age(lag: int) -> None:
    packed = pack([spans_rollout([30 - lag])], 8, trainer_version=30, max_lag=2)
    assert packed["response_mask"].sum() == 2


def test_m15_age_and_truncation_masks_are_joined() -> None:
    m15 = dataclasses.replace(spans_rollout([12]), status=Status.TRUNCATED, cause="tokens")
    packed = pack([m15], 8, rows=1, trainer_version=12, max_lag=2, stale_policy="mask_span")
    assert not packed["response_mask"].any()
