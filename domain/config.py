"""The run configuration (TOML): read once, validated here.

Each key is documented once, where it is defined. Unknown keys are refused with a suggestion, and
settings that cannot hold together are refused with the reason (`domain.validity`).
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from domain.errors import ConfigError
from domain.validity import conflicts, explain

Truncation = Literal["mask", "score", "zero", "drop"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

OWN_LOOP = "own-loop"
"""`tasks.dataset` of a run that a Python loop trains (`rollbook.RolloutScheduler`): its batches come
from that loop. `tasks.source` is the same where the source is an object of the loop's process."""


class Section(BaseModel):
    """A table of the TOML file. Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


EnvironmentName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
Args = dict[str, JsonValue]


class Member(Section):
    """One environment of a mix: `[[tasks.mix]]`."""

    environment: EnvironmentName
    """Its name in the ledger, and of the task queue (`rollout-NAME`) of the workers that run it."""
    source: str
    """As `tasks.source`."""
    args: Args = {}
    """As `tasks.args`."""
    dataset: str = ""
    """As `tasks.dataset`."""
    ratio: Positive = 1
    """Its part of the tasks drawn: of any sum-of-all-ratios draws in a row, so many are its own."""
    in_flight: Positive | None = None
    """Groups of it that are sampled at once. Those that wait keep their places, and their turn."""


class Tasks(Section):
    """What is learned: from one environment, or from several in a mix."""

    source: str = ""
    """`module:name` of an Env, PromptSource, HarnessSource or SessionSource, or of a class or
    function that makes one. Modules are looked up beside the configuration file first. Or an
    environment of a package (`domain.ecosystem`): `reasoning_gym:NAME`, `verifiers:ENV_ID`."""
    args: Args = {}
    """What that class, function or package's environment is made with."""
    dataset: str = ""
    """`module:name` of a sequence of tasks (or a function that returns one), or a JSONL file.
    Default: the tasks of the package's environment that `source` names."""
    batch_size: Positive = 16
    """B: groups a step."""
    environment: EnvironmentName = "default"
    """Names the task queue (`rollout-NAME`) of the workers that run this source."""
    mix: tuple[Member, ...] = ()
    """Instead of `source`, `args`, `dataset` and `environment`: several, each with its ratio."""
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
    max_outage: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for which Postgres, Temporal, the object store, engines or workers may be away: a shorter
    outage stalls the run, a longer one fails it with its cause."""
    filter_zero_variance: bool = False
    """Leave out groups whose members all got the same reward; further groups take their place."""
    max_filtered_batches: Positive = 10
    """Batches' worth of groups in a row that the filter leaves out before the run fails."""


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
    """Images of one rollout. Must be set for messages to hold any: engines are asked before."""


class TinyModel(Section):
    """A small transformer with random weights, for demos and tests (a GPT-2 of the given size)."""

    alphabet: str = "0123456789="
    """One token per character; EOS is added."""
    dim: Positive = 64
    layers: Positive = 2
    heads: Positive = 4
    max_positions: Positive = 64


class Lora(Section):
    """Train a low-rank adapter and leave the model's own weights as they are (needs peft)."""

    rank: Positive = 16
    alpha: Positive = 32
    """The change is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Layers by the last part of their name (`q_proj`); default: every linear one but the head."""


class Model(Section):
    """The policy."""

    path: str | None = None
    """Folder of a Hugging Face causal language model with its tokenizer."""
    tiny: TinyModel | None = None
    """Instead of `path`: a built-in tiny model."""
    initial: Literal["pretrained", "random"] = "pretrained"
    """`random` keeps the folder's architecture and draws the weights from the run's seed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    """Without it all weights are trained and published."""
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
    ranks: Positive = 1
    """Trainer processes, each with a share of the data, of which a step takes `tasks.batch_size`
    groups; so a step trains ranks times as many. Fixed when the run is created."""
    readers: Positive = 1
    """Ranks that read one share: the first of them plans and hands over, all hold the same rows, and
    each computes a part of them. So more processes take a step of as many groups; there are ranks /
    readers shares."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: every rank holds the whole model and its optimizer. `fsdp`: they are divided among the
    ranks (FSDP2), for models that do not fit one device with them."""
    activation_checkpointing: bool | None = None
    """Keep only the inputs of each layer for the backward pass and compute the rest again: much less
    memory for a third more compute. Default: on, but for a tiny model."""
    threads: Positive | None = None
    """torch threads of each trainer process; fixed at run creation, since digests depend on it.
    Default: all cores, divided among the ranks."""
    exact: Literal["bits", "order"] = "bits"
    """`bits`: a replay must reproduce the weights; `order`: kernels are not deterministic."""

    @property
    def shares(self) -> int:
        """Parts that the data is divided into."""
        return self.ranks // self.readers

    @property
    def overlong(self) -> tuple[int, int] | None:
        """Where the soft overlong penalty starts and stops, in sampled tokens of a rollout."""
        if self.overlong_from is None or self.overlong_to is None:
            return None
        return self.overlong_from, self.overlong_to


class Checkpoint(Section):
    """When the trainer's state becomes durable."""

    every: Positive = 1
    """K, in steps. A crash costs at most K-1 recomputed steps, never a rollout."""
    keep: Positive = 3
    """Newest checkpoints kept."""


class Engine(Section):
    """The engine that `rollbook run` starts when no engine address is configured."""

    kind: Literal["builtin", "vllm"] = "builtin"
    """`vllm`: a vLLM server of the environment whose interpreter ROLLBOOK_VLLM_PYTHON names."""
    max_resident: Positive = 4
    """Versions held at once. vLLM holds so many adapters, but only one version of full weights."""
    max_batch: Positive = 64
    """Requests decoded together."""
    max_waiting: NonNegative = 1024
    """Requests an engine takes beyond those, of all workers; more are sent away and ask again, here or
    at another engine."""
    threads: Positive | None = None
    arguments: tuple[str, ...] = ()
    """Further flags of `vllm serve`."""


class Evaluation(Section):
    """Held-out evaluation of the last version, and of others: the same source on other tasks."""

    dataset: str
    """As `tasks.dataset`, or an environment of a package."""
    args: Args = {}
    """What that function or package's environment is made with, such as another seed."""
    environment: EnvironmentName | None = None
    """Of a mix: the one whose source plays these tasks."""
    every: Positive | None = None
    """Also evaluate the version before every so many steps, while training goes on. It takes a slot
    of the engine that nothing else needs; where there is none, it waits for the end of the run."""
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

    @property
    def environments(self) -> tuple[str, ...]:
        """Names of the environments that are sampled: of the mix, or the one."""
        return tuple(m.environment for m in self.tasks.mix) or (self.tasks.environment,)

    def of(self, environment: str) -> Self:
        """This job as one environment's worker sees it: with that environment alone.

        Raises:
            ConfigError: the mix has no such environment.
        """
        if not self.tasks.mix:
            return self
        for member in self.tasks.mix:
            if member.environment == environment:
                own = member.model_dump(exclude={"ratio", "in_flight"})
                tasks = self.tasks.model_copy(update=own | {"mix": ()})
                return self.model_copy(update={"tasks": tasks})
        raise ConfigError(
            f"run {self.name} has no environment {environment!r}; it has "
            f"{', '.join(self.environments)}"
        )

    def environment_of(self, task_id: str) -> str:
        """The environment of a task: in a mix, the first part of its id."""
        return task_id.partition("/")[0] if self.tasks.mix else self.tasks.environment

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        for refused, reason in conflicts(self):
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
            lines = [explain(cls, problem) for problem in error.errors()]
            raise ConfigError(f"{origin}: " + "; ".join(lines)) from error
