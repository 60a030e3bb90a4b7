"""The policy, its optimizer steps, and what serves and judges the versions that they make."""

from typing import Annotated, Literal

from pydantic import Field

from domain.config.section import Args, EnvironmentName, NonNegative, Positive, Section

Truncation = Literal["mask", "score", "zero", "drop"]


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
    truncation_by_cause: dict[str, Truncation] = Field(default_factory=dict)
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
    args: Args = Field(default_factory=dict)
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
