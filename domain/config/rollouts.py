"""What is learned, in which groups, how it is sampled and how old it may be when it trains."""

from typing import Annotated, Literal

from pydantic import Field

from domain.config.section import Args, EnvironmentName, NonNegative, Positive, Section


class Member(Section):
    """One environment of a mix: `[[tasks.mix]]`."""

    environment: EnvironmentName
    """Its name in the ledger, and of the task queue (`rollout-NAME`) of the workers that run it."""
    source: str
    """As `tasks.source`."""
    args: Args = Field(default_factory=dict)
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
    args: Args = Field(default_factory=dict)
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
