"""One sampling request: under which version, by which engine, and again while engines fail."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_random_exponential,
)

from activities.album import Album
from activities.inference import EngineClient, Generated, SamplingParams
from activities.routing import Router
from domain.config import RunConfig
from domain.errors import EngineUnavailable, WrongVersion
from domain.ids import policy_name, sampling_seed
from domain.images import placed
from domain.messages import AttemptIn
from domain.rollouts import Segment
from storage import pins
from storage.attempts import Started
from storage.database import Ledger
from storage.pins import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an attempt asks for."""

    attempt: AttemptIn
    started: Started
    config: RunConfig
    number: int
    """Counts the attempt's requests, those of earlier executions included."""
    prompt_ids: Sequence[int]
    images: Sequence[str] = ()
    """Digests of what the prompt's image tokens stand for, in order."""
    max_tokens: int
    stop_ids: tuple[int, ...]
    prefer: str | None
    """The engine that holds the attempt's cache."""
    give_up_at: float
    """Monotonic time until which failing engines are tried again."""
    partial: "list[Answer]" = field(default_factory=list)
    """Receives what was sampled when the caller is cancelled meanwhile."""
    failures: list[str] = field(default_factory=list)
    """Receives why engines did not answer, for people who look at the attempt."""

    @property
    def left_s(self) -> float:
        """Seconds that are left to try."""
        return max(0.0, self.give_up_at - time.monotonic())


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine sampled, and under which version it was asked to."""

    generated: Generated
    engine: str
    version: int


class Sampler:
    """What all attempts of a worker process share: the ledger, the engine client, the router."""

    def __init__(
        self, ledger: Ledger, engines: EngineClient, router: Router, album: Album | None = None
    ) -> None:
        self.ledger = ledger
        self.album = album
        """Where images are kept; None where nobody sends any."""
        self._engines = engines
        self._router = router

    async def answer(self, request: Request) -> Answer:
        """Sample, on one engine after the other while they fail and the attempt's time lasts.

        Raises:
            EngineUnavailable: no engine answered in time.
            EngineRefused, WrongVersion: the answer cannot be used, now or again.
            Fenced: another execution owns the attempt (`sampling.policy = "segment"`).
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(EngineUnavailable),
            # A group goes on with its slowest rollout, so none sleeps long when an engine is back.
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            stop=stop_before_delay(request.left_s),
            reraise=True,
        ):
            with attempt:
                # The first try may take its time: an engine that works is Temporal's to time out.
                # After a failure the end must come before Temporal's, so that engines are blamed.
                failed = attempt.retry_state.attempt_number > 1
                try:
                    async with asyncio.timeout(request.left_s if failed else None):
                        return await self._ask(request)
                except EngineUnavailable as error:
                    request.failures.append(str(error)[:200])
                    raise
                except TimeoutError as error:
                    raise EngineUnavailable(
                        "no engine answered before the attempt's time ran out"
                    ) from error
        raise AssertionError("unreachable: the last failure is raised")

    async def _ask(self, request: Request) -> Answer:
        i, config = request.attempt, request.config
        segment = config.sampling.policy == "segment"
        choice = await self._choose(request)
        version, stale = choice.version, choice.version - choice.anchor
        policy = policy_name(i.run, version)
        params = SamplingParams(
            max_tokens=request.max_tokens,
            seed=sampling_seed(config.seed, i.group, i.sample, i.attempt, request.number),
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            min_p=config.sampling.min_p,
            stop_token_ids=request.stop_ids,
            kv_max_staleness=stale,
            swap_kv_bound=config.sampling.kv_cache.max_staleness if segment else None,
        )
        shown = await self.album.parts(request.images) if self.album and request.images else ()
        weights = await self._router.weights_sha256(i.run, version)
        async with self._router.engine(i.run, version, prefer=request.prefer) as url:
            generated = await self._engines.generate(
                url,
                policy,
                request.prompt_ids,
                params,
                request_id=f"{i.run}.g{i.group}.s{i.sample}.a{i.attempt}"
                f".f{request.started.fence}.{request.number}",
                # Under "segment" a prefix outlives its version, within the bound that is sent along.
                salt=i.run if segment else policy,
                weights_sha256=weights,
                images=shown,
                on_partial=lambda found: request.partial.append(Answer(found, url, version)),
            )
            if generated.finish_reason == "abort":
                raise EngineUnavailable(f"engine {url} gave a request of {policy} up")
        if segment and generated.sampled_ids and generated.kv_version is None:
            raise WrongVersion(
                f"engine {url} does not say which version's KV it extended for {policy}; "
                'sampling.policy = "segment" needs an engine that does'
            )
        return Answer(generated, url, version)

    async def _choose(self, request: Request) -> Choice:
        """The version to sample from, and the anchor of the KV that may be extended."""
        pinned = request.started.version
        if request.config.sampling.policy == "trajectory":
            return Choice(version=pinned, anchor=pinned)
        cache = request.config.sampling.kv_cache
        return await self.ledger.run(
            pins.choose_version,
            request.attempt,
            request.started.fence,
            max_staleness=cache.max_staleness,
            refill=cache.on_limit == "refill",
            resident=await self._router.resident(request.attempt.run),
        )


def segment_of(request: Request, answer: Answer, generated: Generated) -> Segment:
    """What is recorded of a request.

    Args:
        request: what was asked.
        answer: by whom it was answered, under which version.
        generated: its answer, or as much of it as is kept.
    """
    version = min((v for v, _ in generated.spans), default=answer.version)
    return Segment(
        prompt_ids=generated.prompt_ids or request.prompt_ids,
        sampled_ids=generated.sampled_ids,
        logprobs=generated.logprobs,
        finish_reason=generated.finish_reason,
        version=version,
        version_spans=generated.spans if len(generated.spans) > 1 else None,
        kv_version=version if generated.kv_version is None else generated.kv_version,
        cached_prompt_tokens=generated.cached_prompt_tokens,
        support=generated.support,
        images=placed(request.images, generated.places),
    )
