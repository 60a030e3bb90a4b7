"""How the weights of a loop of one's own reach the engines.

`EnginePublisher` goes the way of the built-in trainer: through the object store, loaded by every
engine, checked there against a probe. A `Publisher` of the user's own pushes by whatever way it
likes; the version it then reports is what the ledger records as served.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from domain.config import RunConfig
from domain.errors import ConfigError
from storage import versions
from storage.database import Ledger
from storage.objects import ObjectStore
from trainer import folders
from trainer.waiting import Waits

if TYPE_CHECKING:
    from trainer import publishing
    from trainer.model import Policy


@runtime_checkable
class Publisher(Protocol):
    """Puts weights into the engines that sample.

    After `load(weights, v)` they must answer requests for the model `RUN@v`, and `version` must be
    v: the version that the engines report, not the one that was asked for. A publisher that also has
    `digest(weights) -> bytes` (32 of them) lets a replay be compared with what it made before.
    """

    @property
    def version(self) -> int:
        """The version that the engines hold; negative before the first."""

    def load(self, weights: Any, version: int) -> None:
        """Make them hold these weights; returns when they do."""


@dataclass
class Desk:
    """What publishing needs of a run."""

    ledger: Ledger
    store: ObjectStore
    scratch: Path
    waits: Waits
    config: RunConfig
    epoch: int
    engines: tuple[str, ...]
    model: Path
    """The model folder, as it is on this machine."""


@dataclass(frozen=True)
class First:
    """The weights that a run begins with."""

    manifest_key: str
    size: int | None
    """Bytes of all its files."""
    probe: Mapping[str, Any] | None
    sha256: bytes


class EnginePublisher:
    """Publishes to rollbook's engines (built-in, or any that `ROLLBOOK_ENGINES` names).

    Weights are a mapping from the model's parameter names to torch tensors, such as
    `network.state_dict()`; aliases of tied tensors may be in it.
    """

    def __init__(self, model: str | Path, *, dtype: str = "float32") -> None:
        """Read the model folder.

        Args:
            model: a Hugging Face folder (config.json, tokenizer.json); its weights are not used.
            dtype: of the served weights, `float32` or `bfloat16`; given ones are converted.

        Raises:
            ConfigError: the folder is none.
        """
        self.model = folders.existing(Path(model), key="EnginePublisher(model)")
        self.dtype = dtype
        self._policy: Policy | None = None
        self._desk: Desk | None = None
        self._publishing: publishing.Publisher | None = None

    @property
    def version(self) -> int:
        """The newest version that every live engine holds; -1 before the first."""
        desk = self._bound()
        served = desk.ledger.call(versions.served, desk.config.name)
        return -1 if served is None else served

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Publish, and wait until it is served.

        Raises:
            ConfigError: the weights are not the model's.
            EngineUnavailable: no engine served it in time.
        """
        self._put(weights)
        assert self._publishing is not None
        self._publishing.publish(version, first=version == 0)

    def digest(self, weights: Mapping[str, Any]) -> bytes:
        """sha256 over names, types, shapes and bytes of what would be served."""
        from trainer.model import weights_digest

        return weights_digest(self._put(weights).weights())

    def bind(self, desk: Desk, model: str) -> None:
        """Publish for this run from now on; `model` is its folder's manifest key."""
        from trainer import publishing

        self._desk = desk
        if self._policy is None:
            self._policy = self._build(desk.config)
        self._publishing = publishing.Publisher(
            desk.ledger,
            desk.store,
            desk.scratch,
            self._policy,
            desk.waits,
            desk.config.name,
            desk.epoch,
            model=model,
            longest=desk.config.max_context_tokens,
            sync_every=desk.config.schedule.sync_every,
        )

    def first(self, weights: object) -> First:
        """Upload version 0."""
        from trainer import publishing
        from trainer.model import weights_digest

        desk, longest = self._bound(), self._bound().config.max_context_tokens
        assert isinstance(weights, Mapping)
        policy = self._put(weights)
        assert self._publishing is not None
        probe, model = publishing.probe(policy, longest), self._publishing.model
        digest = weights_digest(policy.weights())
        stored = desk.waits.outlast(
            lambda: publishing.upload(
                desk.store,
                desk.scratch,
                policy,
                f"weights/{desk.config.name}/0",
                model=model,
                probe=probe,
                sha256=digest,
            )
        )
        return First(stored.manifest_key, stored.bytes, probe, digest)

    def _bound(self) -> Desk:
        if self._desk is None:
            raise ConfigError(
                "an EnginePublisher publishes for the RolloutScheduler it is given to"
            )
        return self._desk

    def _build(self, config: RunConfig) -> "Policy":
        """The folder's network, to name tensors and to score the probe; random numbers are not
        drawn from the caller's generators."""
        import torch

        from trainer.model import Policy

        with torch.random.fork_rng():
            return Policy.build(self.model, config, torch.device("cpu"))

    def _put(self, weights: Mapping[str, Any]) -> "Policy":
        """The network with these weights.

        Raises:
            ConfigError: names what differs.
        """
        self._bound()
        assert self._policy is not None
        mine, known = self._policy.weights(), self._policy.network.state_dict()
        odd = sorted((mine.keys() - weights.keys()) | (weights.keys() - known.keys()))
        if odd:
            raise ConfigError(
                f"state.weights does not belong to the model in {self.model}: {odd[:5]} differ; give "
                "its parameters by name, as network.state_dict() does"
            )
        try:
            self._policy.load({n: weights[n].detach().to(t.dtype) for n, t in mine.items()})
        except ValueError as error:
            raise ConfigError(f"state.weights: {error}") from error
        return self._policy
