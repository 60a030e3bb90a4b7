"""The figures of a step's data: who is in it, how it packs, how old it is, what it earned.

Names are those of the step record; what the update itself did comes from `trainer.objective`.

    status/<s>          share of the rollouts                masked/<s>   sampled ids left out of the
    reward/mean         trained rewards, trained members                  loss by the truncation
                                                                          policy / all sampled ids
    lag/mean, max       version - token version, over the tokens that take loss; lag/hist/<n> counts
    staleness/…         frac_masked: tokens of trained rollouts that are too old; span_age_p99: of
                        all sampled ids
    latency/…           seconds from submission to finish
    length/…            mean sampled ids of a rollout: what tail cutting keeps and what it loses
    environment/<e>/…   of a mix: its groups in the step, mean reward as judged, mean sampled ids

A figure with nothing to count is left out, never 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from domain.config import RunConfig, Trainer
from domain.rollouts import Rollout
from trainer.members import Member, group_members, judge
from trainer.packing import Packed


def of_batch(
    rollouts: Sequence[Rollout],
    packed: Packed,
    config: Trainer,
    version: int,
    *,
    latencies: Sequence[float] = (),
    cancelled_tokens: Sequence[int] = (),
) -> dict[str, float]:
    """Figures of the rollouts that a step trains, and of their packed rows.

    Args:
        rollouts: all members of the planned groups, trained or not.
        packed: their rows (`pack`).
        config: for truncation and the overlong penalty.
        version: the trainer's version before the step.
        latencies: seconds from submission to finish of the rollouts.
        cancelled_tokens: sampled ids of the rollouts that were cancelled in their favour.
    """
    members = judged(rollouts, config)
    tokens = [rollout.policy_tokens for rollout in rollouts]
    return (
        _shares(rollouts, members, tokens)
        | _rewards(rollouts, members)
        | _rows(packed)
        | _ages(rollouts, members, tokens, packed, version)
        | _cached(rollouts)
        | _latencies(latencies)
        | _means({"length/admitted": tokens, "length/cancelled": cancelled_tokens})
    )


def by_environment(rollouts: Sequence[Rollout], config: RunConfig) -> dict[str, float]:
    """Of a mix: what each environment earned and its share of the step; nothing otherwise."""
    if not config.tasks.mix:
        return {}
    told: dict[str, float] = {}
    for name in config.environments:
        own = [rollout for rollout in rollouts if config.environment_of(rollout.task) == name]
        told[f"environment/{name}/groups"] = float(len({rollout.group for rollout in own}))
        rewards = [rollout.reward for rollout in own if rollout.reward is not None]
        told |= _means(
            {
                f"environment/{name}/reward": rewards,
                f"environment/{name}/length": [rollout.policy_tokens for rollout in own],
            }
        )
    return told


def judged(rollouts: Sequence[Rollout], config: Trainer) -> list[Member]:
    """What the run's configuration makes of each rollout (`trainer.members.judge`)."""
    return judge(
        rollouts,
        truncation=config.truncation,
        truncation_by_cause=config.truncation_by_cause,
        overlong=config.overlong,
    )


def weights(rollouts: Sequence[Rollout], packed: Packed, config: Trainer) -> dict[str, float]:
    """What the means among one rank's figures are taken over, for `pool`."""
    members = judged(rollouts, config)
    compared = [
        group
        for group in group_members(rollouts)
        if any(members[i].reward is not None for i in group)
    ]
    trained = [r for r, member in zip(rollouts, members, strict=True) if member.trains]
    mask = packed["response_mask"]
    return {
        "rollouts": float(len(rollouts)),
        "sampled": float(sum(rollout.policy_tokens for rollout in rollouts)),
        "groups": float(len(compared)),
        "trained": float(len(trained)),
        "candidates": float(sum(rollout.policy_tokens for rollout in trained)),
        "tokens": float(np.count_nonzero(mask)),
        "slots": float(mask.size),
        "chains": float(packed["segment_ids"].max(axis=1, initial=0).sum()),
        "prompts": float(sum(len(s.prompt_ids) for r in rollouts for s in r.segments)),
    }


_SUMMED = ("tokens/", "pack/rows", "lag/hist/")
_LARGEST = ("lag/max", "staleness/span_age_p99")
_OF_THE_STEP = ("latency/", "length/cancelled")
_MEANS = {
    "status/": "rollouts",
    "length/admitted": "rollouts",
    "masked/": "sampled",
    "reward/zero_variance_group_frac": "groups",
    "reward/": "trained",
    "pack/fill": "slots",
    "merge/calls_per_chain": "chains",
    "staleness/frac_masked": "candidates",
    "lag/mean": "tokens",
    "sampling/cached_prompt_fraction": "prompts",
}


def pool(ranks: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, float]:
    """The figures of a step from those of its ranks: `(of_batch, weights)` of each.

    Counts are summed and means weighted by what they were taken over, so they are those of one
    process with all rollouts; a maximum is the largest, and so is `span_age_p99`, which no rank can
    tell of the others' tokens. Latencies and cancelled lengths are of the whole step on every rank.
    """
    told: dict[str, float] = {}
    for name in sorted({name for mine, _ in ranks for name in mine}):
        values = [mine[name] for mine, _ in ranks if name in mine]
        if name.startswith(_SUMMED) or name.endswith("/groups"):
            told[name] = sum(values)
        elif name.startswith(_LARGEST):
            told[name] = max(values)
        elif name.startswith(_OF_THE_STEP):
            told[name] = values[0]
        else:
            counts = [_counts(name, mine, weights) for mine, weights in ranks]
            mean = sum(mine.get(name, 0.0) * n for (mine, _), n in zip(ranks, counts, strict=True))
            told[name] = mean / (sum(counts) or 1.0)
    return told


def _counts(name: str, mine: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """What the mean `name` of one rank counts among those of all."""
    if name.startswith("environment/"):
        return mine.get(f"{name.rpartition('/')[0]}/groups", 0.0)
    return weights[next(over for prefix, over in _MEANS.items() if name.startswith(prefix))]


def _shares(
    rollouts: Sequence[Rollout], members: Sequence[Member], tokens: Sequence[int]
) -> dict[str, float]:
    counts = Counter(rollout.status for rollout in rollouts)
    told = {f"status/{status}": count / len(rollouts) for status, count in counts.items()}
    total = sum(tokens)
    left_out: Counter[str] = Counter()
    for rollout, member, sampled in zip(rollouts, members, tokens, strict=True):
        if not member.trains:
            left_out[rollout.status] += sampled
    if total:
        told |= {f"masked/{status}": count / total for status, count in left_out.items()}
    return told | {"tokens/sampled": float(total)}


def _rewards(rollouts: Sequence[Rollout], members: Sequence[Member]) -> dict[str, float]:
    rewards: list[float] = []
    components: dict[str, list[float]] = {}
    for rollout, member in zip(rollouts, members, strict=True):
        if member.trains and member.reward is not None:
            rewards.append(member.reward)
            for name, value in rollout.components.items():
                components.setdefault(name, []).append(value)
    flat: list[float] = []
    for group in group_members(rollouts):
        compared = [reward for i in group if (reward := members[i].reward) is not None]
        if compared:
            flat.append(float(max(compared) == min(compared)))
    return _means(
        {"reward/mean": rewards, "reward/zero_variance_group_frac": flat}
        | {f"reward/component/{name}": values for name, values in sorted(components.items())}
    )


def _rows(packed: Packed) -> dict[str, float]:
    used = packed["segment_ids"] > 0
    mask = packed["response_mask"]
    told = {
        "pack/rows": float(len(mask)),
        "tokens/packed": float(np.count_nonzero(used)),
        "tokens/trained": float(np.count_nonzero(mask)),
    }
    if used.size:
        told["pack/fill"] = told["tokens/packed"] / used.size
    chains = int(packed["segment_ids"].max(axis=1, initial=0).sum())
    if chains:
        # The ids of a call lie together, so calls are counted where the call changes.
        rollout, segment = packed["rollout_index"][mask], packed["segment_index"][mask]
        changes = (rollout[1:] != rollout[:-1]) | (segment[1:] != segment[:-1])
        told["merge/calls_per_chain"] = (1 + int(np.count_nonzero(changes))) / chains
    return told


def _ages(
    rollouts: Sequence[Rollout],
    members: Sequence[Member],
    tokens: Sequence[int],
    packed: Packed,
    version: int,
) -> dict[str, float]:
    told: dict[str, float] = {}
    mask = packed["response_mask"]
    trained = int(np.count_nonzero(mask))
    candidates = sum(n for n, member in zip(tokens, members, strict=True) if member.trains)
    if candidates:
        told["staleness/frac_masked"] = 1 - trained / candidates
    spans = Counter[int]()
    for rollout in rollouts:
        for segment in rollout.segments:
            for sampled_under, count in segment.spans:
                spans[version - sampled_under] += count
    if spans.total():
        told["staleness/span_age_p99"] = float(_percentile(spans, 0.99))
    if trained:
        counts = np.bincount(version - packed["versions"][mask])
        lags = np.flatnonzero(counts)
        told["lag/mean"] = float(lags @ counts[lags]) / trained
        told["lag/max"] = float(lags[-1])
        told |= {f"lag/hist/{lag}": float(counts[lag]) for lag in lags}
    return told


def _percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least `share` of all do not exceed."""
    seen, total = 0, counts.total()
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return value
    raise ValueError("no values to take a percentile of")


def _cached(rollouts: Sequence[Rollout]) -> dict[str, float]:
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    prompts = sum(len(segment.prompt_ids) for segment in segments)
    if not prompts:
        return {}
    cached = sum(segment.cached_prompt_tokens for segment in segments)
    return {"sampling/cached_prompt_fraction": cached / prompts}


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    if not len(seconds):
        return {}
    percentiles = np.percentile(seconds, [50, 90, 99, 100]).tolist()
    return dict(
        zip(("latency/p50", "latency/p90", "latency/p99", "latency/max"), percentiles, strict=True)
    )


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(np.mean(of)) for name, of in values.items() if len(of)}
