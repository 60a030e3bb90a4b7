"""Packing: rollouts into rows of tokens, ready for one forward pass.

Chains (`domain.chains`) go into rows by first-fit decreasing (`domain.packing`); none is split.
Every array is `[rows, width]`:

    input_ids          token ids                                         padding 0
    segment_ids        1, 2, … per chain of a row                                0
    positions          restart at 0 in each chain                                0
    rollout_index      index into the rollouts given                            -1
    advantages         the rollout's, on every token of its chains               0
    behavior_logprobs  sampler's log-probability, on sampled ids                 0
    versions           policy version, on sampled ids                           -1
    segment_index      segment of the rollout, on sampled ids                   -1
    response_mask      sampled ids that take loss
    rollout_weights    1 / trainable ids of the rollout over all its chains, on the mask

All are aligned on the id they speak of ("onto ids"): column t scores input_ids[t]. With a
`support_capacity` two arrays `[rows, capacity]` hold the ids that filtered sampling kept, back to
back in row order: `support_ids`, and `support_columns`, the column of the sampled id; -1 is padding,
and a sampled id without an entry was drawn from the whole vocabulary.

Where chains hold images, two more arrays say which: `image_places [n, 3]`, the row, the first column
and the number of columns that stand for one, and `image_sha256 [n, 32]`, its digest in bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from domain.chains import Chain, merge
from domain.groups import Truncation
from domain.images import PlacedImage
from domain.packing import first_fit
from domain.packing import rows_needed as rows_needed
from domain.rollouts import Rollout, Segment
from domain.staleness import too_old
from trainer import supports
from trainer.advantages import Estimator
from trainer.members import Pool, judge, member_advantages

Packed = dict[str, NDArray[Any]]
StalePolicy = Literal["wait", "resubmit", "mask_span", "keep"]

_LAYOUT: dict[str, tuple[type[np.generic], int]] = {
    "input_ids": (np.int64, 0),
    "segment_ids": (np.int32, 0),
    "positions": (np.int64, 0),
    "response_mask": (np.bool_, 0),
    "behavior_logprobs": (np.float32, 0),
    "versions": (np.int32, -1),
    "rollout_index": (np.int32, -1),
    "segment_index": (np.int32, -1),
    "advantages": (np.float32, 0),
    "rollout_weights": (np.float32, 0),
    "support_ids": (np.int32, -1),
    "support_columns": (np.int32, -1),
}
_SUPPORT = ("support_ids", "support_columns")


@dataclass(frozen=True, slots=True)
class _Age:
    """The bound on age at training."""

    current: int
    bound: int
    policy: StalePolicy


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampled ids `start..stop` of a chain, with what their segment says of them."""

    start: int
    stop: int
    index: int
    segment: Segment
    versions: NDArray[np.int32] | int
    keep: NDArray[np.bool_] | bool
    """Which of them take loss."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chain that will be packed."""

    rollout: int
    chain: Chain
    sampled: tuple[_Sampled, ...]


def chain_lengths(
    rollouts: Sequence[Rollout],
    width: int,
    *,
    truncation: Truncation = "mask",
    truncation_by_cause: Mapping[str, Truncation] | None = None,
) -> list[int]:
    """Tokens of each chain that takes rows, in (rollout, chain) order.

    Raises:
        ValueError: a chain is wider than `width`.
    """
    members = judge(rollouts, truncation=truncation, truncation_by_cause=truncation_by_cause)
    return [
        len(placed.chain)
        for index, (rollout, member) in enumerate(zip(rollouts, members, strict=True))
        if member.trains
        for placed in _chains(index, rollout, width, None)
    ]


def pack(
    rollouts: Sequence[Rollout],
    width: int,
    *,
    rows: int | None = None,
    estimator: Estimator = "group",
    truncation: Truncation = "mask",
    support_capacity: int | None = None,
    truncation_by_cause: Mapping[str, Truncation] | None = None,
    standardize: bool = False,
    overlong: tuple[int, int] | None = None,
    pool: Pool | None = None,
    trainer_version: int | None = None,
    max_lag: int | None = None,
    stale_policy: StalePolicy = "keep",
    support_grows: bool = False,
) -> Packed:
    """The rollouts of a step as arrays (see the module docstring).

    Members of a group are found by (task, group); their order does not matter to the advantages.

    Args:
        rollouts: members of whole groups.
        width: tokens of a row.
        rows: rows of the result; default: as many as are needed.
        estimator: of the advantages.
        truncation: what becomes of truncated members.
        support_capacity: kept ids a row can hold; needed when sampling was filtered.
        truncation_by_cause: exceptions by truncation cause.
        standardize: divide `batch` advantages by their standard deviation.
        overlong: soft overlong penalty `(start, stop)`, see `trainer.members.judge`.
        pool: under `batch`, what all processes have to compare with.
        trainer_version: version the rows are trained at; checked against every sampled token.
        max_lag: oldest age that may train.
        stale_policy: `mask_span` takes older tokens out of the loss (they stay as context, and
            their rollout's reward in the baseline); `wait` and `resubmit` promise that none gets
            here; `keep` trains them.
        support_grows: give rows that hold more than `support_capacity` kept ids the room they
            need, instead of refusing them.

    Raises:
        ValueError: more rows, wider chains or larger supports than fit; a token newer than the
            trainer, or older than `wait` or `resubmit` allow; a segment whose parts disagree.
    """
    age = _age(trainer_version, max_lag, stale_policy)
    members = judge(
        rollouts,
        truncation=truncation,
        truncation_by_cause=truncation_by_cause,
        overlong=overlong,
    )
    values = member_advantages(rollouts, members, estimator, standardize=standardize, pool=pool)
    chains = [
        placed
        for index, (rollout, member) in enumerate(zip(rollouts, members, strict=True))
        if member.trains
        for placed in _chains(index, rollout, width, age)
    ]
    lengths = [len(placed.chain) for placed in chains]
    row_of = first_fit(lengths, width)
    needed = max(row_of, default=-1) + 1
    if rows is not None and needed > rows:
        raise ValueError(f"{len(chains)} chains need {needed} rows of {width} tokens, not {rows}")
    kept = _kept(chains, row_of, needed)
    capacity = supports.room(kept, support_capacity, grows=support_grows)
    packed = blank(needed if rows is None else rows, width, capacity)
    _fill(packed, chains, row_of, np.asarray(values, dtype=np.float32))
    if not np.isfinite(packed["behavior_logprobs"]).all():
        row, column = np.argwhere(~np.isfinite(packed["behavior_logprobs"]))[0]
        culprit = rollouts[int(packed["rollout_index"][row, column])]
        raise ValueError(f"{_name(culprit)} has a log-probability that is not finite")
    return packed


def rows_digest(packed: Packed) -> bytes:
    """SHA-256 of the packed rows: of every array its name, kind, shape and bytes."""
    digest = sha256()
    for name in sorted(packed):
        array = np.ascontiguousarray(packed[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()


def _age(current: int | None, bound: int | None, policy: StalePolicy) -> _Age | None:
    if current is None:
        if policy != "keep":
            raise ValueError(f"stale_policy {policy!r} needs trainer_version")
        return None
    if bound is None and policy != "keep":
        raise ValueError(f"stale_policy {policy!r} needs max_lag")
    return _Age(current, bound or 0, policy)


def _chains(index: int, rollout: Rollout, width: int, age: _Age | None) -> Iterator[_Placed]:
    """The rollout's chains that have a trainable id."""
    for chain in merge(rollout.segments):
        if len(chain) > width:
            raise ValueError(
                f"{_name(rollout)} has a chain of {len(chain)} tokens, wider than a row of {width}; "
                "raise width or lower budget.max_context_tokens"
            )
        sampled = tuple(
            _sampled(span.start, span.stop, span.segment, rollout, age) for span in chain.spans
        )
        if any(np.any(part.keep) for part in sampled):
            yield _Placed(index, chain, sampled)


def _sampled(start: int, stop: int, number: int, rollout: Rollout, age: _Age | None) -> _Sampled:
    segment = rollout.segments[number]
    spans = segment.spans
    counts = (
        len(segment.logprobs),
        sum(tokens for _, tokens in spans),
        stop - start if segment.support is None else len(segment.support),
    )
    if any(count != stop - start for count in counts):
        raise ValueError(
            f"{_name(rollout)}, segment {number}: {stop - start} sampled ids, but {counts[0]} "
            f"log-probabilities, {counts[1]} ids in version spans and {counts[2]} kept sets"
        )
    if len(spans) == 1:
        version = spans[0][0]
        return _Sampled(start, stop, number, segment, version, _young(version, age, rollout))
    keep = [_young(version, age, rollout) for version, _ in spans]
    tokens = [tokens for _, tokens in spans]
    versions = np.repeat(np.array([version for version, _ in spans], dtype=np.int32), tokens)
    return _Sampled(start, stop, number, segment, versions, np.repeat(keep, tokens))


def _young(version: int, age: _Age | None, rollout: Rollout) -> bool:
    """Whether a token of `version` takes loss."""
    if age is None:
        return True
    try:
        old = too_old(version, age.current, age.bound)
    except ValueError as error:
        raise ValueError(f"{_name(rollout)}: {error}") from None
    if old and age.policy in ("wait", "resubmit"):
        raise ValueError(
            f"{_name(rollout)} has tokens of version {version}, more than max_lag = {age.bound} "
            f"behind the trainer's {age.current}; stale_policy {age.policy!r} may never train them"
        )
    return not old or age.policy == "keep"


def _kept(chains: Sequence[_Placed], row_of: Sequence[int], rows: int) -> list[int]:
    """Kept ids of each row."""
    kept = [0] * rows
    for placed, row in zip(chains, row_of, strict=True):
        for part in placed.sampled:
            if part.segment.support is not None:
                kept[row] += int(supports.counts(part.segment.support, part.keep).sum())
    return kept


def blank(rows: int, width: int, capacity: int | None) -> Packed:
    """Rows of padding, in which nothing takes loss."""
    return {
        name: np.full((rows, (capacity or 0) if name in _SUPPORT else width), fill, dtype=dtype)
        for name, (dtype, fill) in _LAYOUT.items()
        if name not in _SUPPORT or capacity is not None
    }


def _fill(
    packed: Packed, chains: Sequence[_Placed], row_of: Sequence[int], values: NDArray[np.float32]
) -> None:
    rows, width = packed["input_ids"].shape
    trainable = np.zeros(len(values), dtype=np.int64)
    for placed in chains:
        for part in placed.sampled:
            trainable[placed.rollout] += (
                np.count_nonzero(part.keep)
                if isinstance(part.keep, np.ndarray)
                else (part.stop - part.start) * part.keep
            )
    weights = 1.0 / np.maximum(trainable, 1)
    ramp = np.arange(width)
    filled, chains_in, kept = [0] * rows, [0] * rows, [0] * rows
    shown: list[tuple[int, int, PlacedImage]] = []
    for which in sorted(range(len(chains)), key=lambda i: -len(chains[i].chain)):
        placed, row = chains[which], row_of[which]
        start, size = filled[row], len(placed.chain)
        filled[row] += size
        chains_in[row] += 1
        here = slice(start, start + size)
        packed["input_ids"][row, here] = np.frombuffer(placed.chain.ids, dtype=np.int32)
        packed["segment_ids"][row, here] = chains_in[row]
        packed["positions"][row, here] = ramp[:size]
        packed["rollout_index"][row, here] = placed.rollout
        packed["advantages"][row, here] = values[placed.rollout]
        shown += [(row, start + image.offset, image) for image in placed.chain.images]
        for part in placed.sampled:
            there = slice(start + part.start, start + part.stop)
            packed["response_mask"][row, there] = part.keep
            packed["behavior_logprobs"][row, there] = part.segment.logprobs
            packed["versions"][row, there] = part.versions
            packed["segment_index"][row, there] = part.index
            packed["rollout_weights"][row, there] = part.keep * weights[placed.rollout]
            if part.segment.support is not None and "support_ids" in packed:
                ids, columns = packed["support_ids"][row], packed["support_columns"][row]
                kept[row] = supports.fill(
                    ids, columns, kept[row], there.start, part.segment, part.keep
                )
    if shown:
        places = [(row, column, image.length) for row, column, image in shown]
        digests = b"".join(bytes.fromhex(image.sha256) for *_, image in shown)
        packed["image_places"] = np.array(places, dtype=np.int32)
        packed["image_sha256"] = np.frombuffer(digests, dtype=np.uint8).reshape(-1, 32)


def _name(rollout: Rollout) -> str:
    return f"task {rollout.task!r}, group {rollout.group}, sample {rollout.sample}"
