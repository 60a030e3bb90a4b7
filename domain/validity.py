"""Settings that cannot hold together, and how a refused configuration reads.

The ledger repeats these rules as CHECK constraints.
"""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from domain.rollouts import TRUNCATION_CAUSES

if TYPE_CHECKING:
    from domain.config import RunConfig

PACKAGES = ("reasoning_gym", "verifiers")
"""Packages whose environments can be named as sources; `domain.ecosystem` has their adapters."""


def of_a_package(reference: str) -> bool:
    """Whether `PACKAGE:NAME` names a package's environment, which brings its tasks."""
    return reference.partition(":")[0] in PACKAGES


def _of_tasks(c: "RunConfig") -> list[tuple[bool, str]]:
    """What `[tasks]`, a mix and `[evaluation]` must name."""
    t, mixed = c.tasks, bool(c.tasks.mix)
    names = [member.environment for member in t.mix]
    sources: list[tuple[str, str, str]] = [
        (f"tasks.mix of {m.environment!r}: ", m.source, m.dataset) for m in t.mix
    ] or [("tasks.", t.source, t.dataset)]
    held_out = None if c.evaluation is None else c.evaluation.environment
    return [
        (
            mixed and bool(t.source or t.dataset or t.args),
            "tasks.mix stands beside tasks.source, dataset or args; each environment of a mix has "
            "its own, so move them there",
        ),
        (
            not mixed and not t.source,
            "tasks.source is missing; name a source, or several in [[tasks.mix]]",
        ),
        *(
            (
                not dataset and bool(source) and not of_a_package(source),
                f"{where}dataset is missing; only the environments of packages bring their tasks",
            )
            for where, source, dataset in sources
        ),
        (
            len(set(names)) < len(names),
            f"tasks.mix has one environment twice: {', '.join(sorted(names))}",
        ),
        (
            mixed and t.epochs is not None,
            f"tasks.epochs = {t.epochs} has no meaning in a mix, whose environments repeat each at "
            "its own pace; set steps",
        ),
        (
            mixed and c.evaluation is not None and held_out not in names,
            f"evaluation.environment = {held_out!r}: say which environment of the mix plays the "
            f"held-out tasks: {', '.join(names)}",
        ),
        (
            not mixed and held_out is not None,
            f"evaluation.environment = {held_out!r} is for runs with [[tasks.mix]]; leave it out",
        ),
    ]


def conflicts(c: "RunConfig") -> list[tuple[bool, str]]:
    """Settings that cannot hold together, each with its reason and remedy."""
    s, g, t, k = c.schedule, c.groups, c.trainer, c.sampling.kv_cache
    bounded = s.stale_policy in ("wait", "resubmit")
    deadline = g.completion.mode == "deadline"
    on_stragglers = g.completion.on_stragglers
    segment = c.sampling.policy == "segment"
    bad_causes = sorted(set(t.truncation_by_cause) - set(TRUNCATION_CAUSES))
    return [
        *_of_tasks(c),
        (
            c.steps is None and c.tasks.epochs is None,
            "neither steps nor tasks.epochs is set, so the run would never end; set one of them",
        ),
        (
            (c.model.path is None) == (c.model.tiny is None),
            "set exactly one of model.path (a model folder) and [model.tiny]",
        ),
        (
            bounded and s.ahead + s.sync_every - 1 > s.max_lag,
            f"schedule.max_lag = {s.max_lag} is below ahead + sync_every - 1 = "
            f"{s.ahead + s.sync_every - 1}: a first submission would already be too old; raise "
            "max_lag or lower ahead or sync_every",
        ),
        (
            s.stale_policy == "mask_span" and not s.allow_trajectory_loss,
            'schedule.stale_policy = "mask_span" can leave old spans untrained; acknowledge it '
            "with schedule.allow_trajectory_loss = true",
        ),
        (
            s.stale_policy == "keep" and not s.allow_unbounded_staleness,
            'schedule.stale_policy = "keep" trains tokens of any age; acknowledge it with '
            "schedule.allow_unbounded_staleness = true",
        ),
        (
            deadline and g.completion.max_straggler_tokens is None,
            'groups.completion.mode = "deadline" needs max_straggler_tokens',
        ),
        (
            deadline and g.completion.min_members > g.size,
            f"groups.completion.min_members = {g.completion.min_members} exceeds groups.size = "
            f"{g.size}",
        ),
        (
            deadline and on_stragglers != "truncate" and bounded,
            f'on_stragglers = "{on_stragglers}" makes partial groups, which need stale_policy '
            '"mask_span" or "keep"',
        ),
        (
            deadline and on_stragglers != "carry_over" and not s.allow_trajectory_loss,
            f'on_stragglers = "{on_stragglers}" loses parts of rollouts; acknowledge it with '
            "schedule.allow_trajectory_loss = true",
        ),
        (
            deadline
            and on_stragglers == "carry_over"
            and (s.order == "dataset" or t.estimator != "batch" or s.ahead < 1),
            'on_stragglers = "carry_over" needs order "deadline" or "admission", estimator '
            '"batch" and ahead >= 1',
        ),
        (
            segment and k.max_staleness == 0 and k.on_limit == "hold",
            'sampling.policy = "segment" with kv_cache.max_staleness = 0 and on_limit = "hold" '
            "could never change its version; allow staleness or use refill",
        ),
        (
            k.on_limit == "refill" and not k.allow_reprefill,
            'kv_cache.on_limit = "refill" recomputes prefixes; acknowledge it with '
            "allow_reprefill = true",
        ),
        (
            not segment and (k.max_staleness > 0 or k.on_limit != "hold" or k.allow_reprefill),
            'sampling.policy = "trajectory" keeps one version per rollout and takes only the '
            "default kv_cache settings",
        ),
        (
            s.stale_policy == "wait" and s.order == "admission",
            'order = "admission" with stale_policy = "wait" can hold for ever; use "deadline"',
        ),
        (
            s.stale_policy == "wait" and s.order == "dataset" and s.ahead > 0,
            'order = "dataset" with stale_policy = "wait" needs ahead = 0 (synchronous)',
        ),
        (
            s.stale_policy == "wait" and t.overflow != "accumulate",
            'stale_policy = "wait" counts on B groups a step, so it needs overflow = "accumulate"',
        ),
        (
            t.overflow == "cut" and s.order != "dataset",
            'trainer.overflow = "cut" needs schedule.order = "dataset"',
        ),
        (
            s.filter_zero_variance and s.order == "dataset",
            "schedule.filter_zero_variance replaces groups by further ones, which needs order "
            '"deadline" or "admission"',
        ),
        (
            s.filter_zero_variance and t.estimator == "batch",
            'trainer.estimator = "batch" compares a rollout with the whole batch, so that equal '
            "rewards within a group still teach; schedule.filter_zero_variance needs another",
        ),
        (
            s.filter_zero_variance and g.size < 2,
            "schedule.filter_zero_variance would leave out every group: the reward of one rollout "
            f"equals itself; it needs groups.size of at least 2 (it is {g.size})",
        ),
        (
            c.admit > c.tasks.batch_size or (c.admit < c.tasks.batch_size and s.order != "dataset"),
            f"groups.admit = {c.admit} must not exceed tasks.batch_size = {c.tasks.batch_size}, "
            'and a smaller one needs schedule.order = "dataset"',
        ),
        (
            t.estimator in ("group", "rloo") and g.size < 2,
            f'trainer.estimator = "{t.estimator}" compares members, so groups.size must be at '
            f"least 2 (it is {g.size})",
        ),
        (
            t.standardize and t.estimator != "batch",
            'trainer.standardize applies to estimator "batch" only',
        ),
        (
            s.max_lag > 0 and t.importance is None,
            f"schedule.max_lag = {s.max_lag} trains off-policy tokens, which needs "
            "trainer.importance (a cap such as 5.0 or a band)",
        ),
        (
            isinstance(t.importance, tuple) and not 0 < t.importance[0] < 1 < t.importance[1],
            f"trainer.importance = {t.importance} is no band around 1; write [low, high]",
        ),
        (
            t.ranks % t.readers != 0,
            f"trainer.ranks = {t.ranks} is no multiple of trainer.readers = {t.readers}: each share of "
            "the data has as many readers; change one of them",
        ),
        (
            t.parallel == "fsdp" and t.ranks == 1,
            'trainer.parallel = "fsdp" divides the model among several ranks, and trainer.ranks = 1; '
            'raise trainer.ranks (--ranks), or leave parallel at "ddp"',
        ),
        (
            t.exact == "order" and c.checkpoint.every != 1,
            'trainer.exact = "order" publishes durable versions only, so checkpoint.every must '
            "be 1",
        ),
        (
            c.budget.final_answer_reserve
            >= min(c.budget.max_generated_tokens, c.max_context_tokens),
            f"budget.final_answer_reserve = {c.budget.final_answer_reserve} leaves nothing of "
            f"max_generated_tokens = {c.budget.max_generated_tokens} or of the context of "
            f"{c.max_context_tokens} for the turns before the answer",
        ),
        (
            c.max_context_tokens > t.width,
            f"budget.max_context_tokens = {c.max_context_tokens} exceeds trainer.width = "
            f"{t.width}: a rollout would not fit into a row",
        ),
        (
            c.sampling.filtered and c.sampling.top_k < 1,
            "filtered sampling (top_p, min_p) needs sampling.top_k too, which bounds the ids kept "
            "per token: without it no row has room for certain",
        ),
        (
            c.sampling.filtered and (t.support_capacity or 0) < c.sampling.top_k * t.width,
            f"filtered sampling needs trainer.support_capacity >= top_k * width = "
            f"{c.sampling.top_k * t.width} (it is {t.support_capacity}), so that the trainer scores "
            "every token on the set it was drawn from; a row that overflowed would stop the run",
        ),
        (
            bool(bad_causes),
            f"trainer.truncation_by_cause has no cause {bad_causes}; causes are "
            f"{list(TRUNCATION_CAUSES)}",
        ),
        (
            (t.overlong_from is None) != (t.overlong_to is None)
            or (
                t.overlong_from is not None
                and t.overlong_to is not None
                and t.overlong_from >= t.overlong_to
            ),
            "trainer.overlong_from and overlong_to go together, from below to",
        ),
        (
            c.engine.kind != "vllm" and bool(c.engine.arguments),
            f"engine.arguments = {list(c.engine.arguments)} are flags of vLLM, which needs "
            'engine.kind = "vllm"',
        ),
        (
            t.schedule != "constant" and c.steps is None,
            f'trainer.schedule = "{t.schedule}" needs steps, to know where it ends',
        ),
    ]


def explain(root: type[BaseModel], problem: Any) -> str:
    """One validation problem as a sentence, with the nearest known key for an unknown one."""
    path = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        known = _known_keys(root, path[:-1])
        near = get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {'.'.join(path)!r}; {hint}"
    if problem["type"] == "missing":
        return f"key {'.'.join(path)!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(path)} = {problem['input']!r}: {message}" if path else message


def _known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part)
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return sorted(set(model.model_fields) - {"root"})
