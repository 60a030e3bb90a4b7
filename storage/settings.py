"""A run's settings as columns of `runs`, where CHECK constraints judge them once more."""

from datetime import timedelta
from typing import Any

from domain.config import RunConfig
from storage.database import jsonb


def columns(config: RunConfig) -> dict[str, Any]:
    """The columns that views, guards and constraints read; the rest lives in `runs.config`."""
    schedule, groups, trainer, cache = (
        config.schedule,
        config.groups,
        config.trainer,
        config.sampling.kv_cache,
    )
    deadline = groups.completion.mode == "deadline"
    return {
        "seed": config.seed,
        "batch_size": config.tasks.batch_size,
        "admit": config.admit,
        "group_size": groups.size,
        "oversample": groups.oversample,
        "order": schedule.order,
        "overflow": trainer.overflow,
        "ahead": schedule.ahead,
        "sync_every": schedule.sync_every,
        "max_lag": schedule.max_lag,
        "max_attempts": groups.max_attempts,
        "max_stale": groups.max_stale,
        "max_losses": groups.max_losses,
        "stuck_after": timedelta(seconds=groups.stuck_after),
        "max_empty_batches": schedule.max_empty_batches,
        "timeout_s": groups.timeout,
        "max_generated_tokens": config.budget.max_generated_tokens,
        "stale_policy": schedule.stale_policy,
        "completion": groups.completion.mode,
        "min_members": groups.completion.min_members if deadline else None,
        "max_straggler_tokens": groups.completion.max_straggler_tokens,
        "on_stragglers": groups.completion.on_stragglers if deadline else None,
        "sampling_policy": config.sampling.policy,
        "kv_max_staleness": cache.max_staleness,
        "kv_on_limit": cache.on_limit,
        "allow_reprefill": cache.allow_reprefill,
        "estimator": trainer.estimator,
        "importance": None if trainer.importance is None else jsonb(trainer.importance),
        "truncation": trainer.truncation,
        "truncation_by_cause": jsonb(trainer.truncation_by_cause),
        "on_reopen": schedule.on_reopen,
        "on_resident_limit": config.sampling.on_resident_limit,
        "exact": trainer.exact,
        "checkpoint_every": config.checkpoint.every,
        "allow_trajectory_loss": schedule.allow_trajectory_loss,
        "allow_unbounded_staleness": schedule.allow_unbounded_staleness,
    }
