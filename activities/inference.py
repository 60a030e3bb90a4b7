"""The one engine client: token ids in, token ids and log-probabilities out.

Speaks vLLM's `/inference/v1/generate` and `abort_requests`, and rollbook's `load`, `unload` and
`health`. Every answer is checked (`activities/answers.py`) before anyone sees it.

    EngineUnavailable   connection, time-out, 5xx, a policy that it has not: another engine may do
    EngineBusy          429: another engine may do, or the same a moment later
    EngineRefused       4xx, with the engine's own words
    WrongVersion        other weights than those named

**Cancellation.** A task that is cancelled inside `generate` aborts its request at the engine, waits
at most `ABORT_PATIENCE_S` for what was sampled so far, hands it to `on_partial`, and lets the
CancelledError go on. Whatever happens, the connection is closed, and a closed connection is an abort
too: nothing goes on running for a caller who has gone.

**Long requests.** The JSON of many tokens is made, read and checked one request at a time, and the
event loop turns in between: when hundreds of long answers arrive together, heartbeats still leave in
time. (Threads would be worse: each would keep the interpreter's lock from the loop at every system
call.)
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import aiohttp

from activities.answers import Generated, SamplingParams, expansion, generated, required
from activities.connections import Answer, Connections
from activities.liveness import HEALTH_TIMEOUT_S, Liveness
from domain import tracing
from domain.errors import EngineBusy, EngineError, EngineRefused, EngineUnavailable, WrongVersion

ABORT_PATIENCE_S = 2.0
LONG_B = 65_536
"""Bytes of JSON, some thousand tokens, that are read at once whoever else has something long."""

T = TypeVar("T")
__all__ = ["Crossing", "EngineClient", "Generated", "Health", "SamplingParams"]

_REQUEST_ID_PREFIX = "generate-tokens-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What an engine says of itself."""

    incarnation: int
    max_resident: int
    policies: Mapping[str, str]
    """Weights digest by policy name."""
    running: int
    waiting: int
    capabilities: frozenset[str] = frozenset()
    """Names of `domain.capabilities`; an engine that does not say has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What requests may do that run while an engine of one slot replaces its weights."""

    kv_max_staleness: int
    """How much older than the new version the KV may be that they go on with."""
    refill: bool
    """Whether, beyond that, their KV may be computed again under the new version."""


class EngineClient:
    """Talks to any number of engines over one connection pool. One per process and event loop."""

    def __init__(
        self,
        *,
        connections: int = 1024,
        connect_s: float = 5.0,
        answer_s: float = 3600.0,
        load_s: float = 600.0,
    ) -> None:
        """Nothing is connected yet.

        Args:
            connections: open at once, over all engines; a request that finds none waits up to
                `answer_s`.
            connect_s: seconds to connect.
            answer_s: seconds one generation may take, alive or not.
            load_s: seconds an engine may take to fetch and check weights.
        """
        self._http = Connections(connections, connect_s=connect_s)
        self._answer_s = answer_s
        self._load_s = load_s
        self._liveness = Liveness(self._look)
        self._turn = asyncio.Lock()

    async def aclose(self) -> None:
        """Close all connections; requests in progress are aborted by that."""
        await self._http.aclose()

    async def generate(
        self,
        engine_url: str,
        policy: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        salt: str,
        weights_sha256: str | None = None,
        images: Sequence[Mapping[str, str]] = (),
        priority: int = 0,
        on_partial: Callable[[Generated], None] | None = None,
    ) -> Generated:
        """Sample one segment.

        Args:
            engine_url: base URL of the engine.
            policy: `run@version`.
            prompt_ids: the whole context.
            params: how to sample.
            request_id: unique; what `abort` takes.
            salt: requests with different salts never share KV.
            weights_sha256: if given, an engine that reports other weights is refused.
            images: `content_parts` in the order of the prompt's image tokens; then the answer holds
                the prompt as the model saw it.
            priority: requests with a larger one wait for those with a smaller one.
            on_partial: called with what was sampled when this task is cancelled meanwhile, if the
                engine answers in time. It may be empty; it must not raise or wait.

        Raises:
            EngineUnavailable: another engine may do.
            EngineRefused: this request will be refused every time, or its answer is malformed.
            WrongVersion: other weights were used.
        """
        body: dict[str, Any] = {
            "model": policy,
            "token_ids": prompt_ids,
            "request_id": request_id,
            "cache_salt": salt,
            "priority": priority,
            "sampling_params": params.body(),
        }
        if params.kv_max_staleness:
            body["kv_max_staleness"] = params.kv_max_staleness
        if images:
            body |= {"content_parts": list(images), "return_token_ids": True}

        with tracing.span(
            "engine call", engine=engine_url, policy=policy, prompt_tokens=len(prompt_ids)
        ):
            found = await self._generate(engine_url, body, params, weights_sha256, on_partial)
            tracing.note(
                sampled_tokens=len(found.sampled_ids), finish_reason=str(found.finish_reason)
            )
            return found

    async def _generate(
        self,
        engine_url: str,
        body: dict[str, Any],
        params: SamplingParams,
        weights_sha256: str | None,
        on_partial: Callable[[Generated], None] | None,
    ) -> Generated:
        pending = asyncio.create_task(self._sample(engine_url, body, params, weights_sha256))
        try:
            await self._liveness.wait(engine_url, pending)
            return await pending
        except asyncio.CancelledError:
            if on_partial is not None:
                partial = await self._partial(pending, engine_url, body["request_id"])
                if partial is not None:
                    on_partial(partial)
            raise
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait([pending])
            if not pending.cancelled():
                pending.exception()  # seen: it was raised above, or the caller has gone

    async def abort(self, engine_url: str, request_id: str) -> None:
        """End a request at the engine; its pending `generate` returns the partial answer.

        Raises:
            EngineUnavailable, EngineRefused: as for `generate`.
        """
        await self._post(
            engine_url,
            "/inference/v1/abort_requests",
            _encode({"request_ids": [_REQUEST_ID_PREFIX + request_id]}),
            timeout_s=ABORT_PATIENCE_S,
        )

    async def load(
        self,
        engine_url: str,
        policy: str,
        manifest: str,
        sha256: str,
        *,
        crossing: Crossing | None = None,
    ) -> int:
        """Make an engine serve a policy; the incarnation that acknowledged it.

        Args:
            engine_url: base URL of the engine.
            policy: `run@version`.
            manifest: key of its weights' manifest.
            sha256: digest of its weights.
            crossing: what requests may do that run while an engine replaces its weights; None:
                they end under the weights they began with.

        Raises:
            EngineUnavailable: connection, time-out, 5xx (507: no free slot).
            EngineRefused: the name stands for other weights (409) or the weights are bad (422).
            WrongVersion: it acknowledged another digest.
        """
        order = _encode(
            {
                "policy": policy,
                "manifest": manifest,
                "sha256": sha256,
                "crossing": None if crossing is None else asdict(crossing),
            }
        )
        answered = await self._post(engine_url, "/rollbook/load", order, timeout_s=self._load_s)
        answer = _json(engine_url, answered)
        held = required(engine_url, answer, "policies", dict).get(policy)
        if held != sha256:
            raise WrongVersion(
                f"engine {engine_url} was to load {policy} with weights {sha256} and reports {held}"
            )
        return int(required(engine_url, answer, "incarnation", int))

    async def unload(self, engine_url: str, policy: str) -> None:
        """Stop an engine from routing to a policy; one that it does not have is fine.

        Raises:
            EngineUnavailable, EngineRefused: as for `generate`.
        """
        body = _encode({"policy": policy})
        await self._post(engine_url, "/rollbook/unload", body, timeout_s=30.0, absent=True)

    async def health(self, engine_url: str) -> Health:
        """What an engine holds and how busy it is.

        Raises:
            EngineUnavailable: it does not answer within HEALTH_TIMEOUT_S, or is broken.
        """
        body = _json(engine_url, await self._look(engine_url))
        numbers = ("incarnation", "max_resident", "running", "waiting")
        return Health(
            policies=required(engine_url, body, "policies", dict),
            capabilities=frozenset(body.get("capabilities") or ()),
            **{name: required(engine_url, body, name, int) for name in numbers},
        )

    async def _look(self, engine_url: str) -> Answer:
        answer = await self._ask("GET", engine_url + "/health", timeout_s=HEALTH_TIMEOUT_S)
        if answer.status != 200:
            raise EngineUnavailable(
                f"engine {engine_url}/health answered {answer.status}: {answer.text[:500]}"
            )
        return answer

    async def _sample(
        self,
        engine_url: str,
        body: dict[str, Any],
        params: SamplingParams,
        weights_sha256: str | None,
    ) -> Generated:
        prompt = body["token_ids"]

        def read() -> Generated:
            said = _json(engine_url, answer)
            found = generated(engine_url, body["model"], params, weights_sha256, said)
            if "content_parts" not in body:
                return found
            seen, places = expansion(engine_url, prompt, len(body["content_parts"]), said)
            return replace(found, prompt_ids=seen, places=places)

        content = await self._in_turn(
            8 * len(prompt) + sum(len(part["url"]) for part in body.get("content_parts", ())),
            lambda: _encode(body | {"token_ids": list(prompt)}),
        )
        answer = await self._post(
            engine_url, "/inference/v1/generate", content, timeout_s=self._answer_s
        )
        return await self._in_turn(len(answer.content), read)

    async def _in_turn(self, size: int, work: Callable[[], T]) -> T:
        """Do something that takes as long as `size` bytes of JSON."""
        if size < LONG_B:
            return work()
        async with self._turn:
            await asyncio.sleep(0)  # whatever is due runs before the next one
            return work()

    async def _partial(
        self, pending: "asyncio.Task[Generated]", engine_url: str, request_id: str
    ) -> Generated | None:
        try:
            async with asyncio.timeout(ABORT_PATIENCE_S):
                await self.abort(engine_url, request_id)
                return await asyncio.shield(pending)
        except (EngineError, TimeoutError):  # a doubtful partial answer is none
            return None

    async def _post(
        self, engine_url: str, path: str, content: bytes, *, timeout_s: float, absent: bool = False
    ) -> Answer:
        headers = {"Content-Type": "application/json", **tracing.carrier()}
        answer = await self._ask(
            "POST", engine_url + path, content=content, headers=headers, timeout_s=timeout_s
        )
        status = answer.status
        if status == 404 and absent:
            return answer
        if status == 429:
            raise EngineBusy(f"engine {engine_url}{path} answered 429: {answer.text[:500]}")
        if status >= 500 or status == 499 or _has_restarted(answer):
            raise EngineUnavailable(
                f"engine {engine_url}{path} answered {status}: {answer.text[:500]}"
            )
        if status != 200:
            raise EngineRefused(
                f"engine {engine_url}{path} answered {status}: {answer.text[:2000]}"
            )
        return answer

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Answer:
        try:
            return await self._http.send(
                method, url, content=content, headers=headers, timeout_s=timeout_s
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(
                f"engine {url}: {type(error).__name__} {error}".rstrip()
            ) from error


def _has_restarted(answer: Answer) -> bool:
    """Whether the engine does not know the policy: nobody is sent to one that never held it.

    It has restarted, and until its new incarnation is seen the routes still lead there.
    """
    if answer.status != 404:
        return False
    try:
        return bool(json.loads(answer.content)["error"]["type"] == "UnknownPolicy")
    except (ValueError, LookupError, TypeError):
        return False


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _json(engine_url: str, answer: Answer) -> dict[str, Any]:
    try:
        body = json.loads(answer.content)
    except ValueError as error:
        raise EngineUnavailable(
            f"engine {engine_url} answered what is not JSON: {answer.text[:200]!r}"
        ) from error
    if not isinstance(body, dict):
        raise EngineRefused(f"engine {engine_url} answered {type(body).__name__}, not an object")
    return body
