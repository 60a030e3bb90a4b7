"""What is asked of an engine, and what its answer must be before anyone sees it.

As many finite log-probabilities as ids, the weights that were asked for, KV within its bound, kept
sets that contain their ids.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from domain.errors import EngineRefused, EngineUnavailable, WrongVersion
from domain.ids import policy_version

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    kv_max_staleness: int = 0
    """How many versions older than the policy the retained KV may be."""
    swap_kv_bound: int | None = None
    """None: one version per request. Otherwise newer weights may replace the policy's under the
    request, if the engine says where, and KV may be so many versions older than the newest."""

    @property
    def filtered(self) -> bool:
        """Whether some of the distribution is cut off, so that kept sets must come back."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def body(self) -> dict[str, Any]:
        """The request's `sampling_params`."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "logprobs": 0,
            "seed": self.seed,
            "stop_token_ids": list(self.stop_token_ids),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One answer, checked."""

    policy: str
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """stop (end of sequence, or a stop id; included), length, abort (partial)."""
    spans: tuple[tuple[int, int], ...]
    """`(version, tokens)` in order; they add up to the sampled ids."""
    cached_prompt_tokens: int = 0
    kv_version: int | None = None
    """Oldest version whose KV was extended; None if the engine does not say."""
    support: tuple[tuple[int, ...], ...] | None = None
    """Per sampled id the ids that filtered sampling kept."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt as the model saw it, where it held images."""
    places: tuple[tuple[int, int], ...] = ()
    """`(offset, length)` of each image in it."""

    @property
    def context(self) -> int:
        """Tokens of the prompt with its images, and of what was sampled on it."""
        return len(self.prompt_ids or ()) + len(self.sampled_ids)


def generated(
    engine_url: str,
    policy: str,
    params: SamplingParams,
    weights_sha256: str | None,
    answer: Mapping[str, Any],
) -> Generated:
    """Check one answer; nothing doubtful leaves here.

    Raises:
        EngineRefused: ids, log-probabilities, spans or kept sets do not belong together.
        WrongVersion: other weights, or KV older than allowed.
        EngineUnavailable: the engine gave up on the request.
    """
    choices = required(engine_url, answer, "choices", list)
    if len(choices) != 1:
        raise EngineRefused(f"engine {engine_url} gave {len(choices)} choices, 1 was asked for")
    choice = choices[0]
    ids = required(engine_url, choice, "token_ids", list)
    content = (choice.get("logprobs") or {}).get("content") or []
    reason = choice.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise EngineUnavailable(f"engine {engine_url} ended {policy} with {reason!r}")
    if [entry.get("token_id") for entry in content] != ids:
        raise EngineRefused(
            f"engine {engine_url} gave {len(ids)} ids and {len(content)} log-probabilities for "
            f"{policy} that do not belong together"
        )
    if len(ids) > params.max_tokens:
        raise EngineRefused(
            f"engine {engine_url} gave {len(ids)} ids, {params.max_tokens} were asked for"
        )
    logprobs = [entry["logprob"] for entry in content]
    for at, value in enumerate(logprobs):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise EngineRefused(
                f"engine {engine_url} gave log-probability {value} at token {at} for {policy}"
            )
    spans = _spans(engine_url, policy, params, choice.get("weight_versions") or [], len(ids))
    held = answer.get("weights_sha256")
    swapped = (
        bool(spans) and spans[-1][0] != policy_version(policy)[1]
    )  # its digest is the newest's
    if None not in (weights_sha256, held) and held != weights_sha256 and not swapped:
        raise WrongVersion(
            f"engine {engine_url} sampled {policy} with weights {held}, not {weights_sha256}"
        )
    usage = answer.get("usage") or {}
    return Generated(
        policy=policy,
        sampled_ids=tuple(ids),
        logprobs=tuple(float(value) for value in logprobs),
        finish_reason=reason,
        spans=spans,
        cached_prompt_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        kv_version=_kv_version(engine_url, policy, params, spans, choice.get("kv_version")),
        support=_support(engine_url, choice, ids) if params.filtered else None,
    )


def expansion(
    engine_url: str, asked: Sequence[int], images: int, answer: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The prompt that the model saw, and where its images stand in it.

    Each image takes the place of one id of what was asked; every other id must still be there.

    Raises:
        EngineRefused: the engine does not say, or what it says is another prompt.
    """
    seen = required(engine_url, answer, "prompt_token_ids", list)
    ranges = (answer.get("mm_placeholders") or {}).get("image") or []
    places = tuple((place["offset"], place["length"]) for place in ranges)
    if len(places) != images:
        raise EngineRefused(
            f"engine {engine_url} placed {len(places)} images in a prompt that holds {images}"
        )
    at, start = 0, 0
    for offset, length in places:
        between = offset - start
        if between < 0 or length < 1 or seen[start:offset] != list(asked[at : at + between]):
            break
        at, start = at + between + 1, offset + length
    else:
        if start <= len(seen) and seen[start:] == list(asked[at:]) and at <= len(asked):
            return tuple(seen), places
    raise EngineRefused(
        f"engine {engine_url} answered with another prompt than the one it was asked to extend: "
        f"{len(seen)} ids with images at {list(places)}, where {len(asked)} ids were sent"
    )


def _spans(
    engine_url: str,
    policy: str,
    params: SamplingParams,
    labels: Sequence[Mapping[str, Any]],
    sampled: int,
) -> tuple[tuple[int, int], ...]:
    """`(version, tokens)`; the policy's version alone where the engine has no numbered labels.

    vLLM labels weights engine-wide and does not know adapters: a label that is no number says
    nothing about this request, whose policy was chosen by name.
    """
    version = policy_version(policy)[1]
    if not all(str(label["version"]).isdecimal() for label in labels) or not labels:
        return ((version, sampled),) if sampled else ()
    edges = [0, *(label["end"] for label in labels)]
    if edges[-1] != sampled or any(a >= b for a, b in pairwise(edges)):
        raise EngineRefused(f"engine {engine_url} gave version spans {labels} for {sampled} ids")
    spans = tuple(
        (int(label["version"]), after - before)
        for label, (before, after) in zip(labels, pairwise(edges), strict=True)
    )
    found = [span_version for span_version, _ in spans]
    newer = params.swap_kv_bound is not None and all(a < b for a, b in pairwise([-1, *found]))
    if any(v != version for v in found) and not (newer and found[0] >= version):
        raise WrongVersion(f"engine {engine_url} sampled {policy} with versions {spans}")
    return spans


def _kv_version(
    engine_url: str,
    policy: str,
    params: SamplingParams,
    spans: Sequence[tuple[int, int]],
    found: int | None,
) -> int | None:
    version = policy_version(policy)[1]
    newest = spans[-1][0] if spans else version
    bound = params.kv_max_staleness if newest == version else params.swap_kv_bound or 0
    if newest != version and found is None:
        raise WrongVersion(
            f"engine {engine_url} swapped weights under a request of {policy} and does not say "
            "which version's KV it went on with"
        )
    if found is not None and not newest - bound <= found <= newest:
        raise WrongVersion(
            f"engine {engine_url} extended KV of version {found} for {policy} at version {newest}; "
            f"the bound is {bound} versions"
        )
    return found


def _support(
    engine_url: str, choice: Mapping[str, Any], ids: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    kept = choice.get("sampling_mask")
    if not isinstance(kept, list) or len(kept) != len(ids):
        raise EngineRefused(
            f"engine {engine_url} filtered without reporting the kept ids; filtered sampling "
            "needs an engine with sampling masks (vLLM: --return-sampling-mask)"
        )
    for at, (token, support) in enumerate(zip(ids, kept, strict=True)):
        if token not in support or len(set(support)) != len(support):
            raise EngineRefused(
                f"engine {engine_url}: the kept set of id {token} at {at} must hold it, and no id twice"
            )
    return tuple(tuple(support) for support in kept)


def required(engine_url: str, body: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field of an answer, of exactly this type.

    Raises:
        EngineRefused: it is missing or of another type.
    """
    value = body.get(name)
    if type(value) is not kind:
        raise EngineRefused(
            f"engine {engine_url} answered {name} = {value!r}, expected {kind.__name__}"
        )
    return value
