"""What acknowledged settings may cost, said once when a run starts."""

from domain.config import RunConfig


def acknowledged(config: RunConfig) -> list[str]:
    """One sentence per setting that trades something away, with the figure to watch."""
    schedule, completion = config.schedule, config.groups.completion
    kv = config.sampling.kv_cache
    said = []
    if schedule.stale_policy == "mask_span":
        whole = (
            "; a pinned rollout has one version, so a slow one loses all its tokens at once"
            if config.sampling.policy == "trajectory"
            else ""
        )
        said.append(
            f'stale_policy = "mask_span": tokens more than {schedule.max_lag} versions old were '
            f"paid for and leave the loss{whole} (staleness/frac_masked)"
        )
    if schedule.stale_policy == "keep":
        said.append(
            'stale_policy = "keep": tokens of any age train, and only the importance correction '
            f"({config.trainer.importance}) stands between them and the weights (lag/max)"
        )
    if completion.mode == "deadline":
        allowance = completion.max_straggler_tokens
        lost = {
            "truncate": "are cut there, so long answers are trained truncated or not at all",
            "discard": "are thrown away there, so long answers are missing from the baseline",
            "carry_over": "train later than their siblings, against another batch's baseline",
        }[completion.on_stragglers]
        said.append(
            f'completion = "deadline": members still sampling {allowance} tokens after '
            f"{completion.min_members} have finished {lost} (length/admitted, length/cancelled)"
        )
    if kv.max_staleness:
        said.append(
            f"kv_cache.max_staleness = {kv.max_staleness}: prefixes computed by up to "
            f"{kv.max_staleness} older versions are extended, so a token's distribution is of no "
            "single version; what is recorded is what was sampled from (mismatch/kl)"
        )
    if kv.on_limit == "refill":
        said.append(
            'kv_cache.on_limit = "refill": the whole context is computed again whenever its KV is '
            f"more than {kv.max_staleness} versions old (sampling/cached_prompt_fraction)"
        )
    if config.sampling.on_resident_limit == "cancel":
        said.append(
            'sampling.on_resident_limit = "cancel": when no slot takes a new version, the oldest '
            "rollouts are cancelled and sampled again (resubmitted, cancelled)"
        )
    if config.trainer.overflow == "cut" and config.groups.size > config.trainer.rows:
        said.append(
            f'overflow = "cut" with groups.size = {config.groups.size} above trainer.rows = '
            f"{config.trainer.rows}: a group whose rollouts fill more than half a row each never "
            "fits and is cut (cut)"
        )
    return said
