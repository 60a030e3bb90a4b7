"""The HTTP face: vLLM's token-in, token-out subset and rollbook's load and unload.

    POST /inference/v1/generate         ids in, ids and log-probabilities out
    POST /inference/v1/abort_requests   {"request_ids": ["generate-tokens-…"]}
    POST /rollbook/load, /rollbook/unload
    GET  /health  /metrics  /v1/models

Handlers only parse, hand over and wait; torch runs elsewhere. A caller who disconnects aborts his
request.
"""

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from domain import tracing
from domain.capabilities import BUILT_IN
from domain.ids import policy_version
from engine import fields, refusals
from engine.refusals import PolicyFailed, UnknownPolicy
from engine.requests import REQUEST_ID_PREFIX, Completion, Request
from engine.residents import Residents
from engine.sampling import SamplingParams
from engine.scheduler import Scheduler

GENERATE_FIELDS = {
    "model",
    "token_ids",
    "request_id",
    "cache_salt",
    "priority",
    "kv_max_staleness",
    "sampling_params",
}


def create_app(scheduler: Scheduler, residents: Residents) -> Starlette:
    """The ASGI application over one scheduler."""
    engine = Engine(scheduler, residents)
    return Starlette(
        routes=[
            Route("/inference/v1/generate", engine.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", engine.abort, methods=["POST"]),
            Route("/rollbook/load", engine.load, methods=["POST"]),
            Route("/rollbook/unload", engine.unload, methods=["POST"]),
            Route("/health", engine.health),
            Route("/metrics", engine.metrics),
            Route("/v1/models", engine.models),
        ],
        exception_handlers=refusals.handlers(),
    )


class Engine:
    """The handlers."""

    def __init__(self, scheduler: Scheduler, residents: Residents) -> None:
        self._scheduler = scheduler
        self._residents = residents

    async def generate(self, http: HttpRequest) -> Response:
        """Sample. 200 with finish_reason stop, length or abort; 4xx says what is wrong."""
        body = await fields.object(http)
        unknown = sorted(body.keys() - GENERATE_FIELDS)
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}; use {sorted(GENERATE_FIELDS)}")
        name = fields.text(body, "model")
        limits = self._residents.limits(name)
        if limits is None:
            raise UnknownPolicy(
                f"policy {name!r} is not resident; resident: "
                f"{', '.join(self._residents.policies()) or 'none'}"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion | PolicyFailed] = loop.create_future()

        def deliver(result: Completion | PolicyFailed) -> None:
            loop.call_soon_threadsafe(_settle, answer, result)

        request = Request(
            id=REQUEST_ID_PREFIX
            + (http.headers.get("x-request-id") or fields.text(body, "request_id")),
            policy=name,
            prompt=_prompt(body, *limits),
            params=SamplingParams.parse(body.get("sampling_params", {})),
            deliver=deliver,
            salt=fields.text(body, "cache_salt", ""),
            priority=fields.integer(body, "priority", 0),
            kv_max_staleness=fields.integer(body, "kv_max_staleness", 0, least=0),
        )
        sha256 = self._residents.policies()[name]
        with (
            tracing.continued(http.headers),
            tracing.span("sample", policy=name, prompt_tokens=len(request.prompt)),
        ):
            self._scheduler.submit(request)
            gone = asyncio.create_task(fields.disconnected(http))
            either: list[asyncio.Future[Any]] = [answer, gone]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not answer.done():
                    self._scheduler.cancel(request)
        if not answer.done():
            return Response(status_code=499)
        result = answer.result()
        if isinstance(result, PolicyFailed):
            raise result
        return JSONResponse(_answer(request, result, sha256))

    async def abort(self, http: HttpRequest) -> Response:
        """End requests; each is answered with what it has. Unknown ids do nothing."""
        ids = (await fields.object(http)).get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise ValueError(
                f"request_ids must be a list of strings that begin with {REQUEST_ID_PREFIX}"
            )
        self._scheduler.abort(ids)
        return JSONResponse({})

    async def load(self, http: HttpRequest) -> Response:
        """Fetch, check and serve a policy: 200 acknowledges that it is routable now."""
        body = await fields.object(http)
        name, sha256 = fields.text(body, "policy"), fields.text(body, "sha256")
        await self._residents.load(name, fields.text(body, "manifest"), sha256)
        return JSONResponse(
            {
                "policy": name,
                "sha256": sha256,
                "incarnation": self._residents.incarnation,
                "policies": self._residents.policies(),
            }
        )

    async def unload(self, http: HttpRequest) -> Response:
        """Stop routing to a policy."""
        name = fields.text(await fields.object(http), "policy")
        if not self._residents.unload(name):
            raise UnknownPolicy(f"policy {name!r} is not resident")
        return JSONResponse({"policy": name, "policies": self._residents.policies()})

    async def health(self, _: HttpRequest) -> Response:
        """What is here. 503 once the torch thread has died: replace this process."""
        return JSONResponse(
            {
                "incarnation": self._residents.incarnation,
                "max_resident": self._residents.max_resident,
                "capabilities": BUILT_IN,
                "policies": self._residents.policies(),
                "running": self._scheduler.running,
                "waiting": self._scheduler.waiting,
            },
            status_code=200 if self._scheduler.alive else 503,
        )

    async def metrics(self, _: HttpRequest) -> Response:
        """Counters in the Prometheus text format."""
        gauges = {
            "vllm:num_requests_running": self._scheduler.running,
            "vllm:num_requests_waiting": self._scheduler.waiting,
            "vllm:kv_cache_usage_perc": self._scheduler.kv_usage,
        }
        return PlainTextResponse(
            self._scheduler.metrics.exposition(gauges), media_type="text/plain; version=0.0.4"
        )

    async def models(self, _: HttpRequest) -> Response:
        """The resident policies as vLLM lists models."""
        data = [
            {"id": name, "object": "model", "owned_by": "rollbook", "root": sha256}
            for name, sha256 in self._residents.policies().items()
        ]
        return JSONResponse({"object": "list", "data": data})


def _answer(request: Request, result: Completion, sha256: str) -> dict[str, Any]:
    version = str(policy_version(request.policy)[1])
    sampled = len(result.token_ids)
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "token_ids": result.token_ids,
        "logprobs": {
            "content": [
                {"token_id": token, "logprob": logprob}
                for token, logprob in zip(result.token_ids, result.logprobs, strict=True)
            ]
        },
        "weight_versions": [{"version": version, "start": 0, "end": sampled}] if sampled else [],
        "kv_version": result.kv_version,
    }
    if result.supports is not None:
        choice["sampling_mask"] = result.supports
    return {
        "request_id": request.id,
        "model": request.policy,
        "weights_sha256": sha256,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": sampled,
            "total_tokens": len(request.prompt) + sampled,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }


def _prompt(body: dict[str, Any], vocabulary: int, positions: int) -> tuple[int, ...]:
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError("token_ids must be a list of at least one integer")
    if len(ids) >= positions:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with {positions} positions the model takes at most "
            f"{positions - 1}, to leave one for the answer"
        )
    if min(ids) < 0 or max(ids) >= vocabulary:
        bad = next(i for i in ids if not 0 <= i < vocabulary)
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocabulary}")
    return tuple(ids)


def _settle(
    answer: "asyncio.Future[Completion | PolicyFailed]", result: Completion | PolicyFailed
) -> None:
    if not answer.done():
        answer.set_result(result)
