"""The run configuration (TOML) and the service addresses (environment): read once, validated here.

Each key is documented once, where it is defined. Unknown keys are refused with a suggestion, and
settings that cannot hold together are refused with the reason (`RunConfig.model_post_init`); the
ledger repeats those rules as CHECK constraints.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from domain.errors import ConfigError
from domain.rollouts import TRUNCATION_CAUSES

Truncation = Literal["mask", "score", "zero", "drop"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

OWN_LOOP = "own-loop"
"""`tasks.dataset` of a run that a Python loop trains (`rollbook.RolloutScheduler`): its batches come
from that loop. `tasks.source` is the same where the source is an object of the loop's process."""


class Section(BaseModel):
    """A table of the TOML file. Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class Tasks(Section):
    """What is learned."""

    source: str
    """`module:name` of an Env, PromptSource, HarnessSource or SessionSource, or of a function that
    returns one. Modules are looked up beside the configuration file first."""
    dataset: str
    """`module:name` of a sequence of tasks (or a function that returns one), or a JSONL file."""
    batch_size: Positive = 16
    """B: groups a step."""
    environment: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    """Names the task queue (`rollout-NAME`) of the workers that run this source."""
    epochs: Positive | None = None
    """Passes over the data; without it the data repeats until `steps` is reached."""
    shuffle: bool = True
    """Permute the tasks in each epoch, by the run's seed."""


class Completion(Section):
    """When a group is ready."""

    mode: Literal["wait", "deadline"] = "wait"
    min_members: Positive = 2
    """Under `deadline`: the straggler allowance starts when so many members have finished."""
    max_straggler_tokens: NonNegative | None = None
    """Tokens each unfinished member may still generate after that."""
    on_stragglers: Literal["truncate", "discard", "carry_over"] = "truncate"


class Groups(Section):
    """Rollouts of one task that are compared with each other."""

    size: Positive = 8
    oversample: NonNegative = 0
    """Spare samples started with each fresh group; the first `size` finishers join."""
    admit: Positive | None = None
    """Groups of a batch that are trained (`order="dataset"`); default: all of them."""
    max_attempts: Positive = 3
    """Failures of one sample that abandon its group."""
    max_stale: Positive = 5
    """Stale resubmissions of one sample that expire its group."""
    max_losses: Positive = 20
    """Platform losses that abandon a group."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds from submission until an attempt is cancelled."""
    environment_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one call of the environment or of a verifier may take; a longer one ends the
    attempt as `infra_error`, the function named."""
    quarantine_after: Positive | None = 3
    """Groups of one task, abandoned by the task's own failures, after which it is not drawn again
    (`rollbook quarantine RUN --release TASK`). Without it: never."""
    stuck_after: Annotated[float, Field(gt=0)] = 300.0
    """Seconds without progress after which a rollout is shown as stuck."""
    heartbeat: Annotated[float, Field(ge=1)] = 60.0
    """Seconds without a sign of life after which a rollout's worker is given up, and another goes on
    or starts again. Workers give one twice a second; a blocked event loop gives none."""
    completion: Completion = Completion()


class Schedule(Section):
    """How far sampling runs ahead of training, and what happens to old samples."""

    order: Literal["dataset", "deadline", "admission"] = "deadline"
    ahead: NonNegative = 1
    """Batches sampled ahead of the one in training; 0 is synchronous."""
    sync_every: Positive = 1
    """Publish when the trainer is so many versions ahead of the served one."""
    max_lag: NonNegative = 2
    """S: trainer version minus the version of a rollout's oldest token, at training."""
    stale_policy: Literal["wait", "resubmit", "mask_span", "keep"] = "wait"
    allow_trajectory_loss: bool = False
    """Acknowledges that `mask_span`, `truncate` or `discard` may lose parts of rollouts."""
    allow_unbounded_staleness: bool = False
    """Acknowledges that `keep` trains tokens of any age."""
    on_reopen: Literal["adopt", "cancel"] = "adopt"
    """Groups that still run when a run is resumed: keep them, or cancel and submit them again."""
    max_empty_batches: NonNegative = 3
    """Empty steps in a row that fail the run."""
    filter_zero_variance: bool = False
    """Leave out groups whose members all got the same reward; further groups take their place."""


class KVCachePolicy(Section):
    """How old retained KV may be against the version that samples next (`policy="segment"`)."""

    max_staleness: NonNegative = 0
    on_limit: Literal["hold", "refill"] = "hold"
    allow_reprefill: bool = False


class Sampling(Section):
    """How tokens are drawn."""

    policy: Literal["trajectory", "segment"] = "trajectory"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    kv_cache: KVCachePolicy = KVCachePolicy()
    on_resident_limit: Literal["hold", "cancel"] = "hold"

    @property
    def filtered(self) -> bool:
        """Whether some of the distribution is cut off before sampling."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class BudgetSection(Section):
    """Limits of one rollout, in tokens and turns. A used-up budget truncates with its cause."""

    max_turns: Positive = 8
    max_generated_tokens: Positive = 32768
    max_context_tokens: Positive | None = None
    """Default: the trainer's `width`."""
    segment_tokens: Positive = 4096
    """Longest single sampling request; a longer turn continues in the next segment."""
    final_answer_reserve: NonNegative = 0
    """Tokens kept back for one final answer that the model is asked for."""
    tool_output_tokens: Positive = 4096
    """Longer tool output is elided in the middle."""
    max_turn_tokens: Positive | None = None
    max_images: NonNegative | None = None


class TinyModel(Section):
    """A small transformer with random weights, for demos and tests (a GPT-2 of the given size)."""

    alphabet: str = "0123456789="
    """One token per character; EOS is added."""
    dim: Positive = 64
    layers: Positive = 2
    heads: Positive = 4
    max_positions: Positive = 64


class Model(Section):
    """The policy."""

    path: str | None = None
    """Folder of a Hugging Face causal language model with its tokenizer."""
    tiny: TinyModel | None = None
    """Instead of `path`: a built-in tiny model."""
    initial: Literal["pretrained", "random"] = "pretrained"
    """`random` keeps the folder's architecture and draws the weights from the run's seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    renderer: str = "auto"
    """Chat rendering: a renderer name of the `renderers` package, `template` for the tokenizer's
    own chat template, or `auto`."""


class Trainer(Section):
    """The optimizer step."""

    width: Positive = 2048
    """Tokens of one packed row."""
    rows: Positive = 8
    """Rows of one micro-batch."""
    overflow: Literal["cut", "accumulate"] = "accumulate"
    """More rows than fit: cut whole groups, or run more micro-batches."""
    estimator: Literal["group", "mean", "rloo", "batch"] = "group"
    standardize: bool = False
    """Divide `batch` advantages by their standard deviation."""
    truncation: Truncation = "mask"
    truncation_by_cause: dict[str, Truncation] = {}
    loss: Literal["ppo", "cispo", "gspo"] = "ppo"
    aggregation: Literal["token-mean", "rollout-mean"] = "token-mean"
    importance: Annotated[float, Field(gt=0)] | tuple[float, float] | None = 5.0
    """Cap (truncated importance sampling) or band (low, high) on proximal over behaviour."""
    sequence_mask: tuple[float, float] | None = None
    """Drop sequences whose geometric mean ratio proximal/behaviour leaves (low, high)."""
    epsilon_low: Annotated[float, Field(gt=0)] = 0.2
    epsilon_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the initial weights."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    support_capacity: Positive | None = None
    """Kept ids a packed row may hold; filtered sampling needs `top_k * width`."""
    overlong_from: Positive | None = None
    """Soft overlong penalty: rewards fall linearly from this many sampled tokens on ..."""
    overlong_to: Positive | None = None
    """... by 1 at this many."""
    minibatches: Positive = 1
    """Optimizer updates per step, over disjoint parts of its rows."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] | None = 1.0
    threads: Positive | None = None
    """torch threads; fixed at run creation, since digests depend on it. Default: all cores."""
    exact: Literal["bits", "order"] = "bits"
    """`bits`: a replay must reproduce the weights; `order`: kernels are not deterministic."""


class Checkpoint(Section):
    """When the trainer's state becomes durable."""

    every: Positive = 1
    """K, in steps. A crash costs at most K-1 recomputed steps, never a rollout."""
    keep: Positive = 3
    """Newest checkpoints kept."""


class Engine(Section):
    """The built-in engine that `rollbook run` starts when no engine address is configured."""

    max_resident: Positive = 4
    """Versions held at once."""
    max_batch: Positive = 64
    """Requests decoded together."""
    threads: Positive | None = None


class Evaluation(Section):
    """Held-out evaluation: the same source on other tasks, at chosen versions."""

    dataset: str
    """As `tasks.dataset`."""
    every: Positive | None = None
    """Steps between evaluations; without it only the run's last version is evaluated."""
    samples: Positive = 1
    """Rollouts per task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""


class RunConfig(Section):
    """One training job, complete. Serialised into the ledger at creation and never changed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    seed: NonNegative = 0
    steps: Positive | None = None
    """Steps to train; without it the run ends with the data (`tasks.epochs`)."""
    tasks: Tasks
    groups: Groups = Groups()
    schedule: Schedule = Schedule()
    sampling: Sampling = Sampling()
    budget: BudgetSection = BudgetSection()
    model: Model
    trainer: Trainer = Trainer()
    checkpoint: Checkpoint = Checkpoint()
    engine: Engine = Engine()
    evaluation: Evaluation | None = None
    root: str = "."
    """Folder of the configuration file: relative paths and imports start here. Set on loading."""

    @property
    def max_context_tokens(self) -> int:
        """Longest context of a rollout, in tokens."""
        return self.budget.max_context_tokens or self.trainer.width

    @property
    def admit(self) -> int:
        """Groups of a batch that are trained."""
        return self.groups.admit or self.tasks.batch_size

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        for refused, reason in _conflicts(self):
            if refused:
                raise ValueError(reason)
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and validate a TOML file.

        Raises:
            ConfigError: names the key, the value and the remedy.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        return cls.parse(table | {"root": str(path.resolve().parent)}, origin=str(path))

    @classmethod
    def parse(cls, table: Mapping[str, Any], *, origin: str = "configuration") -> Self:
        """Validate a nested table; every problem is named in one message.

        Raises:
            ConfigError: names the keys, the values and the remedy.
        """
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            raise ConfigError(f"{origin}: " + "; ".join(lines)) from error


def _conflicts(c: RunConfig) -> list[tuple[bool, str]]:
    """Settings that cannot hold together, each with its reason and remedy."""
    s, g, t, k = c.schedule, c.groups, c.trainer, c.sampling.kv_cache
    bounded = s.stale_policy in ("wait", "resubmit")
    deadline = g.completion.mode == "deadline"
    on_stragglers = g.completion.on_stragglers
    segment = c.sampling.policy == "segment"
    bad_causes = sorted(set(t.truncation_by_cause) - set(TRUNCATION_CAUSES))
    return [
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
            not segment and k != KVCachePolicy(),
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
            t.schedule != "constant" and c.steps is None,
            f'trainer.schedule = "{t.schedule}" needs steps, to know where it ends',
        ),
    ]


def _explain(root: type[BaseModel], problem: Any) -> str:
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


class Services(Section):
    """Addresses and credentials, from the environment. Never logged, never in the ledger."""

    database_url: str
    """`ROLLBOOK_DATABASE_URL`: postgresql://user:password@host:port/database"""
    temporal_address: str
    """`ROLLBOOK_TEMPORAL_ADDRESS`: host:port of the frontend."""
    temporal_namespace: str = "rollbook"
    """`ROLLBOOK_TEMPORAL_NAMESPACE`"""
    temporal_ui: str | None = None
    """`ROLLBOOK_TEMPORAL_UI`: where people look, for messages only."""
    s3_endpoint: str
    """`ROLLBOOK_S3_ENDPOINT`"""
    s3_bucket: str = "rollbook-data"
    """`ROLLBOOK_S3_BUCKET`"""
    s3_access_key: str = Field(repr=False)
    """`AWS_ACCESS_KEY_ID`"""
    s3_secret_key: str = Field(repr=False)
    """`AWS_SECRET_ACCESS_KEY`"""
    s3_region: str = "us-east-1"
    """`AWS_REGION`"""
    engines: tuple[str, ...] = ()
    """`ROLLBOOK_ENGINES`: base URLs, separated by commas."""
    engines_run: str | None = None
    """`ROLLBOOK_ENGINES_RUN`: the one run these engines serve; default: every run of the ledger."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        hidden = ("s3_access_key", "s3_secret_key", "database_url")
        return [(k, v) for k, v in super().__repr_args__() if k not in hidden]

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these services."""
        values = {VARIABLES[name]: getattr(self, name) for name in VARIABLES if name != "engines"}
        values["ROLLBOOK_ENGINES"] = ",".join(self.engines)
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables of VARIABLES.

        Raises:
            ConfigError: names the variables that are missing or wrong.
        """
        found: dict[str, Any] = {
            field: environ[name] for field, name in VARIABLES.items() if environ.get(name)
        }
        if "engines" in found:
            found["engines"] = tuple(u.strip() for u in found["engines"].split(",") if u.strip())
        missing = [
            VARIABLES[name]
            for name, field in cls.model_fields.items()
            if field.is_required() and name not in found
        ]
        if missing:
            raise ConfigError(
                f"no address for {', '.join(missing)}; set them, or let `rollbook up` start the "
                "services"
            )
        return cls.model_validate(found)


VARIABLES = {
    "database_url": "ROLLBOOK_DATABASE_URL",
    "temporal_address": "ROLLBOOK_TEMPORAL_ADDRESS",
    "temporal_namespace": "ROLLBOOK_TEMPORAL_NAMESPACE",
    "temporal_ui": "ROLLBOOK_TEMPORAL_UI",
    "s3_endpoint": "ROLLBOOK_S3_ENDPOINT",
    "s3_bucket": "ROLLBOOK_S3_BUCKET",
    "s3_access_key": "AWS_ACCESS_KEY_ID",
    "s3_secret_key": "AWS_SECRET_ACCESS_KEY",
    "s3_region": "AWS_REGION",
    "engines": "ROLLBOOK_ENGINES",
    "engines_run": "ROLLBOOK_ENGINES_RUN",
}
