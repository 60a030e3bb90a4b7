"""The HTTP face of a front: the same routes as the built-in engine's (`engine/app.py`).

    POST /inference/v1/generate         checked, counted, passed on, and answered with its provenance
    POST /inference/v1/abort_requests   passed on
    POST /rollbook/load, /rollbook/unload
    GET  /health  /metrics  /v1/models

**Salt.** vLLM files KV under the request's salt. A request that may extend KV of version `a` and no
older gets a salt made of its own and `a`: whatever lies under that was computed by `a` or later, so
the bound holds without asking vLLM how old its cache is, and requests that allow no older KV never
meet another version's.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from hashlib import blake2b
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from domain import tracing
from domain.errors import EngineUnavailable
from domain.ids import policy_version
from engine import fields, refusals
from engine.refusals import NotResident, PolicyFailed, UnknownPolicy
from engine.vllm.control import ABORT_PREFIX, Answer
from engine.vllm.residents import MayCross, Residents, Running
from engine.vllm.server import Server

NOT_A_NUMBER = -9999.0


def create_app(residents: Residents, server: Server) -> Starlette:
    """The ASGI application of one front. Its lifespan watches the server and ends it."""
    front = Front(residents, server)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(residents.watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop()

    return Starlette(
        routes=[
            Route("/inference/v1/generate", front.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", front.abort, methods=["POST"]),
            Route("/rollbook/load", front.load, methods=["POST"]),
            Route("/rollbook/unload", front.unload, methods=["POST"]),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
            Route("/v1/models", front.models),
        ],
        exception_handlers=refusals.handlers(),
        lifespan=lifespan,
    )


class Front:
    """The handlers."""

    def __init__(self, residents: Residents, server: Server) -> None:
        self._residents = residents
        self._server = server

    async def generate(self, http: HttpRequest) -> Response:
        """Sample. The caller's going away aborts the request at the server."""
        body = await fields.object(http)
        name = fields.text(body, "model")
        staleness = fields.integer(body, "kv_max_staleness", 0, least=0)
        body.pop("kv_max_staleness", None)
        async with self._residents.request(name, staleness) as request:
            sha256 = self._residents.policies()[name]
            body["model"] = self._residents.model(name)
            body["cache_salt"] = _salt(fields.text(body, "cache_salt", ""), request.anchor)
            with tracing.continued(http.headers):
                asking = asyncio.create_task(self._server.control.generate(body))
            gone = asyncio.create_task(fields.disconnected(http))
            try:
                await asyncio.wait([asking, gone], return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                if not asking.done():
                    asking.cancel()
                    await asyncio.wait([asking])
            if asking.cancelled():
                return Response(status_code=499)
            answer = asking.result()
            if not await self._residents.settled(request):
                raise NotResident(f"{name} was replaced by weights that turned out to be wrong")
        if answer.status != 200:
            return Response(answer.body, answer.status, media_type="application/json")
        return JSONResponse(self._with_provenance(request, sha256, answer))

    async def abort(self, http: HttpRequest) -> Response:
        """End requests; each is answered with what it has. Unknown ids do nothing."""
        ids = (await fields.object(http)).get("request_ids")
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise ValueError(
                f"request_ids must be a list of strings that begin with {ABORT_PREFIX}"
            )
        if ids:  # an empty list would abort everything
            await self._server.control.abort(ids)
        return JSONResponse({})

    async def load(self, http: HttpRequest) -> Response:
        """Fetch, verify and serve a policy: 200 acknowledges that it is routable now."""
        body = await fields.object(http)
        name, sha256 = fields.text(body, "policy"), fields.text(body, "sha256")
        may = _may_cross(body)
        await self._residents.load(name, fields.text(body, "manifest"), sha256, may)
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
        if not await self._residents.unload(name):
            raise UnknownPolicy(f"policy {name!r} is not resident")
        return JSONResponse({"policy": name, "policies": self._residents.policies()})

    async def health(self, _: HttpRequest) -> Response:
        """What is here. 503 while the server does not answer."""
        return JSONResponse(
            {
                "incarnation": self._residents.incarnation,
                "max_resident": self._residents.max_resident,
                "policies": self._residents.policies(),
                "running": self._residents.running,
                "waiting": 0,
                "capabilities": self._residents.capabilities,
            },
            status_code=200 if self._residents.alive else 503,
        )

    async def metrics(self, _: HttpRequest) -> Response:
        """The server's own."""
        try:
            text = await self._server.control.metrics()
        except EngineUnavailable:
            text = ""  # not started yet
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, _: HttpRequest) -> Response:
        """The resident policies as vLLM lists models."""
        data = [
            {"id": name, "object": "model", "owned_by": "rollbook", "root": sha256}
            for name, sha256 in self._residents.policies().items()
        ]
        return JSONResponse({"object": "list", "data": data})

    def _with_provenance(self, request: Running, sha256: str, answer: Answer) -> dict[str, Any]:
        """The server's answer, and which weights and which KV it came from."""
        body: dict[str, Any] = json.loads(answer.body)
        version = policy_version(request.policy)[1]
        cached = ((body.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in body["choices"]:
            _ensure_finite(request.policy, choice)
            choice["kv_version"] = request.anchor if cached else request.computed_by
            if not self._residents.labelled:
                # The server labels its base weights; an adapter's version is its name.
                sampled = len(choice["token_ids"])
                label = {"version": str(version), "start": 0, "end": sampled}
                choice["weight_versions"] = [label] if sampled else []
        return body | {"model": request.policy, "weights_sha256": sha256}


def _ensure_finite(policy: str, choice: Mapping[str, Any]) -> None:
    """vLLM answers a log-probability that is not a number with NOT_A_NUMBER, and no rank."""
    for at, entry in enumerate((choice.get("logprobs") or {}).get("content") or ()):
        if entry["logprob"] is None or entry["logprob"] <= NOT_A_NUMBER:
            raise PolicyFailed(f"policy {policy} gave no finite log-probability at token {at}")


def _salt(salt: str, anchor: int) -> str:
    """vLLM takes at most 128 characters, without `@` or `/`."""
    return blake2b(f"{anchor}\0{salt}".encode(), digest_size=16).hexdigest()


def _may_cross(body: dict[str, Any]) -> MayCross | None:
    crossing = body.get("crossing")
    if crossing is None:
        return None
    if not isinstance(crossing, dict) or type(crossing.get("refill")) is not bool:
        raise ValueError(f"crossing must be null or name kv_max_staleness and refill: {crossing!r}")
    staleness = fields.integer(crossing, "kv_max_staleness", 0, least=0)
    return MayCross(kv_max_staleness=staleness, refill=crossing["refill"])
