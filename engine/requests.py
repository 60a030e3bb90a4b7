"""What is asked of the engine, how far it has come, and what is answered.

Request ── admitted ──▶ Sequence ── finished ──▶ Completion, or a PolicyFailed
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.refusals import PolicyFailed
from engine.sampling import SamplingParams, Uniforms

REQUEST_ID_PREFIX = "generate-tokens-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request; partial when `finish_reason` is "abort"."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | None
    cached_tokens: int
    kv_version: int
    supports: list[list[int]] | None


def unstarted(version: int) -> Completion:
    """The answer to a request that was aborted while it waited."""
    return Completion(
        token_ids=[],
        logprobs=[],
        finish_reason="abort",
        stop_reason=None,
        cached_tokens=0,
        kv_version=version,
        supports=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sampling request, validated."""

    id: str
    """As the caller named it, with the prefix; need not be unique."""
    policy: str
    prompt: tuple[int, ...]
    params: SamplingParams
    deliver: Callable[[Completion | PolicyFailed], None]
    """Called once, on the scheduler's thread, unless the request is cancelled."""
    salt: str = ""
    priority: int = 0
    """Lower is sooner."""
    kv_max_staleness: int = 0
    """How many versions older than the policy the retained KV it extends may be."""
    arrived: float = field(default_factory=time.monotonic)


class Sequence:
    """A request in progress: its ids, and how many of them have KV."""

    def __init__(
        self, request: Request, *, stops: frozenset[int], limit: int, version: int
    ) -> None:
        self.request = request
        self.ids = list(request.prompt)
        self.logprobs: list[float] = []
        self.supports: list[list[int]] | None = [] if request.params.filtered else None
        self.stops = stops
        self.limit = limit
        """Most ids it may sample: `max_tokens`, or what the model's positions leave."""
        self.computed = 0
        self.cached_tokens = 0
        self.kv_version = version
        """Oldest weights that computed its KV."""
        self.anchor = version
        """The oldest `kv_version` it ever sampled with; reported."""
        self.first_token_at: float | None = None
        seed = request.params.seed
        self.uniforms = Uniforms(secrets.randbits(63) if seed is None else seed)

    @property
    def pending(self) -> int:
        """Ids without KV: 1 while decoding."""
        return len(self.ids) - self.computed

    def extend(self, tokens: int, kv_version: int) -> None:
        """Start from retained KV of the first ids."""
        self.computed = tokens
        self.kv_version = kv_version
        self.anchor = min(self.anchor, kv_version)

    def add(self, token: int, logprob: float, support: list[int] | None) -> str | None:
        """Append a sampled id; the finish reason if it was the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.supports is not None and support is not None:
            self.supports.append(support)
        if token in self.stops:
            return "stop"
        return "length" if len(self.logprobs) >= self.limit else None

    def completion(self, finish_reason: str) -> Completion:
        """The answer as it stands."""
        sampled = self.ids[len(self.request.prompt) :]
        named = finish_reason == "stop" and sampled[-1] in self.request.params.stop_token_ids
        return Completion(
            token_ids=sampled,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            stop_reason=sampled[-1] if named else None,
            cached_tokens=self.cached_tokens,
            kv_version=self.anchor,
            supports=self.supports,
        )
