"""The settings of `AsyncTrainer` as small objects; each is a table of the run configuration.

    Budget → [budget]     KVCache → [sampling.kv_cache]     GroupCompletion → [groups.completion]
    GroupCentered, LeaveOneOut, Batchwise → trainer.estimator     Loss, AdamW → [trainer]

What each key means and which values are legal is said once, in `domain/config/`; what cannot hold
together is refused there, when the trainer is made.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """How old retained KV may be against the version that samples next."""

    max_staleness: int = 0
    on_limit: Literal["hold", "refill"] = "hold"
    allow_reprefill: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupCompletion:
    """When a group is ready, and what becomes of members that are not."""

    mode: Literal["wait", "deadline"] = "wait"
    min_members: int = 2
    max_straggler_tokens: int | None = None
    on_stragglers: Literal["truncate", "discard", "carry_over"] = "truncate"


LONGEST_CONTEXT = 131_072


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one rollout, in tokens and turns."""

    max_turns: int = 8
    max_generated_tokens: int = 32_768
    max_context_tokens: int = LONGEST_CONTEXT
    """Left at its default it is the trainer's `width`, if that is smaller."""
    segment_tokens: int = 4_096
    final_answer_reserve: int = 0
    tool_output_tokens: int = 4_096
    max_turn_tokens: int | None = None
    max_images: int | None = None

    def within(self, width: int | None) -> dict[str, Any]:
        """The `[budget]` table of a run whose rows have so many tokens."""
        table = asdict(self)
        if width is not None and self.max_context_tokens == LONGEST_CONTEXT:
            table["max_context_tokens"] = min(LONGEST_CONTEXT, width)
        return table


@dataclass(frozen=True, kw_only=True)
class GroupCentered:
    """Reward minus the group's mean, divided by its standard deviation unless told otherwise."""

    standardize: bool = True

    def table(self) -> dict[str, Any]:
        """Its part of `[trainer]`."""
        return {"estimator": "group" if self.standardize else "mean"}


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """Reward minus the mean of the other members."""

    def table(self) -> dict[str, Any]:
        """Its part of `[trainer]`."""
        return {"estimator": "rloo"}


@dataclass(frozen=True, kw_only=True)
class Batchwise:
    """Reward minus the mean of the whole step."""

    standardize: bool = False

    def table(self) -> dict[str, Any]:
        """Its part of `[trainer]`."""
        return {"estimator": "batch", "standardize": self.standardize}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The objective and its off-policy corrections."""

    kind: Literal["ppo", "cispo", "gspo"] = "ppo"
    aggregation: Literal["token-mean", "rollout-mean"] = "token-mean"
    importance: float | tuple[float, float] | None = 5.0
    sequence_mask: tuple[float, float] | None = None
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coefficient: float = 0.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: float = 0.0

    def table(self) -> dict[str, Any]:
        """Its part of `[trainer]`."""
        table = asdict(self)
        return {"loss": table.pop("kind"), **table}


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The optimizer: AdamW over float32 masters, its schedule counted in policy versions."""

    lr: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float | None = 1.0

    def table(self) -> dict[str, Any]:
        """Its part of `[trainer]`."""
        return asdict(self)

    @classmethod
    def of(cls, optimizer: object) -> "AdamW":
        """From an AdamW, a learning rate, or the hyperparameters of a `torch.optim.AdamW`.

        Raises:
            TypeError: it is none of them.
        """
        match optimizer:
            case AdamW():
                return optimizer
            case bool():
                pass
            case int() | float():
                return cls(lr=float(optimizer))
            case _ if type(optimizer).__module__.startswith("torch.optim"):
                return cls._of_torch(type(optimizer).__name__, vars(optimizer)["defaults"])
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give rollbook.AdamW(lr=…), a learning "
            "rate, or a torch.optim.AdamW, whose hyperparameters are taken over"
        )

    @classmethod
    def _of_torch(cls, name: str, given: Mapping[str, Any]) -> "AdamW":
        if name != "AdamW" or given.get("amsgrad") or given.get("maximize"):
            raise TypeError(
                f"optimizer is a torch.optim.{name} with {dict(given)}; only plain AdamW is "
                "computed: give rollbook.AdamW(lr=…)"
            )
        names = ("lr", "betas", "eps", "weight_decay")
        return cls(**{n: given[n] for n in names})


Advantage = GroupCentered | LeaveOneOut | Batchwise
