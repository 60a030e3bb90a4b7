"""`RolloutEngine`: the policy, what it plays, and how its tokens are drawn."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from domain.config import Model, TinyModel
from domain.environments import Source
from domain.errors import ConfigError
from rollbook import own_config
from rollbook.settings import Budget, KVCache


class RolloutEngine:
    """What samples rollouts. It holds settings only: the processes start with `AsyncTrainer.run`."""

    def __init__(
        self,
        model: str | Path | TinyModel | Model | Mapping[str, Any],
        *,
        env: Source | str,
        budget: Budget = Budget(),  # noqa: B008 - frozen
        sampling_policy: Literal["trajectory", "segment"] = "trajectory",
        kv_cache: KVCache = KVCache(),  # noqa: B008 - frozen
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        seed: int = 0,
        sample_timeout: float = 1800.0,
        environment_timeout: float | None = None,
    ) -> None:
        """Say what plays which policy.

        Args:
            model: folder of a Hugging Face causal language model, or a `[model]` table: a
                `TinyModel`, a `Model`, or a mapping of its keys.
            env: Env, PromptSource or SessionSource; an object, or its `module:name`.
            budget: limits of a rollout.
            sampling_policy: one version per rollout, or the newest the KV bound allows per segment.
            kv_cache: how old retained KV may be (`segment`).
            temperature: of sampling, as the next three.
            top_p: share of the distribution kept.
            top_k: ids kept; -1 keeps all.
            min_p: least probability kept, relative to the likeliest id.
            seed: of sampling, data order and initial weights.
            sample_timeout: seconds from submission until a rollout is cancelled and tried again.
            environment_timeout: seconds one call of the environment may take.

        Raises:
            ConfigError: `env` names nothing, or the model is none.
        """
        self.located = own_config.locate(env)
        self.model = _model(model)
        self.budget = budget
        self.sampling: dict[str, Any] = {
            "policy": sampling_policy,
            "kv_cache": asdict(kv_cache),
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
        }
        self.seed = seed
        self.timeouts = {"timeout": sample_timeout, "environment_timeout": environment_timeout}

    @property
    def filtered(self) -> int:
        """Ids that filtered sampling keeps per token at most; 0 when nothing is cut off."""
        top_k = self.sampling["top_k"]
        return int(top_k) if top_k > 0 else 0


def _model(model: object) -> dict[str, Any]:
    match model:
        case str() | Path():
            return {"path": str(Path(model).resolve())}
        case TinyModel():
            return {"tiny": model.model_dump()}
        case Model():
            table = model.model_dump(exclude_defaults=True)
        case Mapping():
            table = dict(model)
        case _:
            raise ConfigError(
                f"model is a {type(model).__name__}; save it with its tokenizer "
                "(save_pretrained) and give the folder, or give rollbook.TinyModel(…)"
            )
    if isinstance(table.get("path"), str):
        table["path"] = str(Path(table["path"]).resolve())
    return table
