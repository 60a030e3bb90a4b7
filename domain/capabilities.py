"""What a run needs of an inference engine, compared with what the engine says it can do.

Asked before an engine loads a run's first version, so that nothing is sampled which could not be
recorded with its real version, or trained on the set it was drawn from.
"""

from collections.abc import Collection

from domain.config import RunConfig

VERSION_SPANS = "version_spans"
"""Reports which version sampled which tokens of a request."""

KV_PROVENANCE = "kv_provenance"
"""Reports the oldest version whose KV a request extended."""

RETAINED_KV = "retained_kv"
"""Extends KV that an older version computed, within the bound that a request names."""

REFILL = "refill"
"""Computes a prefix again under the present weights where older KV is not allowed."""

KEPT_SETS = "kept_sets"
"""Reports the ids that filtered sampling kept per token."""

IMAGES = "images"
"""Takes images with a prompt, and reports which tokens it made of each."""

BUILT_IN = (KEPT_SETS, KV_PROVENANCE, REFILL, RETAINED_KV, VERSION_SPANS)
"""Of the built-in engine."""


def of_vllm(*, adapters: bool, kept_sets: bool, images: bool = False) -> tuple[str, ...]:
    """Of vLLM behind its front.

    Args:
        adapters: it serves an adapter a version, whose KV no other version extends.
        kept_sets: it was started to report them, which its CPU build cannot.
        images: it was started to take them, with a model that sees.
    """
    has = [KV_PROVENANCE, REFILL, VERSION_SPANS]
    if not adapters:
        has.append(RETAINED_KV)
    if kept_sets:
        has.append(KEPT_SETS)
    if images:
        has.append(IMAGES)
    return tuple(has)


def missing(config: RunConfig, *, max_resident: int, capabilities: Collection[str]) -> list[str]:
    """What keeps an engine from sampling for this run, each with its remedy; empty if nothing does.

    Args:
        config: the run.
        max_resident: versions the engine holds at once.
        capabilities: names as above, as the engine reports them.
    """
    schedule, sampling = config.schedule, config.sampling
    segment = sampling.policy == "segment"
    lacks = []
    bounded = schedule.stale_policy in ("wait", "resubmit")
    if not segment and bounded and max_resident <= schedule.max_lag:
        lacks.append(
            f'it holds {max_resident} versions, but sampling.policy = "trajectory" with '
            f"schedule.max_lag = {schedule.max_lag} keeps rollouts of {schedule.max_lag + 1} "
            "versions running at once; raise engine.max_resident (--max-resident), or lower max_lag"
        )
    needs = {
        VERSION_SPANS: ('sampling.policy = "segment"', segment),
        KV_PROVENANCE: ('sampling.policy = "segment"', segment),
        RETAINED_KV: ("sampling.kv_cache.max_staleness", sampling.kv_cache.max_staleness > 0),
        REFILL: ('sampling.kv_cache.on_limit = "refill"', sampling.kv_cache.on_limit == "refill"),
        KEPT_SETS: ("filtered sampling (top_k, top_p, min_p)", sampling.filtered),
        IMAGES: ("budget.max_images", bool(config.budget.max_images)),
    }
    lacks += [
        f"it lacks {name!r}, which {setting} needs; use an engine that has it"
        f"{' (the built-in one does)' if name in BUILT_IN else ''}, or another setting"
        for name, (setting, needed) in needs.items()
        if needed and name not in capabilities
    ]
    return lacks
