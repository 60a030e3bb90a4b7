"""The recording gateway: an OpenAI-compatible server for the programs of harnesses.

Each attempt has a base URL and a key of its own. A call is answered when its segment stands in the
ledger, never before; a stream is cut from the finished answer. The process holds nothing that the
ledger does not: killed, it goes on where the ledger stands.

    what is asked of it                          answer
    a key nobody has                             401 invalid_api_key
    a session that ended or was superseded       403 session_closed
    what the run cannot honour; bad messages     400
    a context that is too long                   400 context_length_exceeded
    another budget that is used up               400 rollout_budget_exhausted
    the engine's answer cannot be used           500, and the attempt is an infra_error
    the ledger is away                           503, and clients try again
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from activities import openai_answers, openai_requests
from activities.access import key_sha256
from activities.gateway_session import LiveSession, Unusable
from activities.openai_answers import Answered
from activities.openai_errors import ApiError
from activities.openai_messages import Json
from activities.openai_requests import Ask
from activities.session import Stopped
from activities.sessions import Entry, Sessions, closed
from domain import tracing
from domain.errors import BudgetExhausted, EngineError, Fenced, LedgerError, ObjectError
from domain.messages import AttemptIn

logger = logging.getLogger(__name__)

LARGEST_BODY = 64 * 2**20
"""Bytes of a request."""

Read = Callable[[object], Ask]
Whole = Callable[[Ask, Answered], Json]
Chunks = Callable[[Ask, Answered], Iterator[Json]]


class Gateway:
    """The routes over the sessions of one process."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"

    def app(self) -> Starlette:
        """The ASGI application."""
        base = "/attempts/{run}/{group:int}/{sample:int}/{attempt:int}/v1"
        return Starlette(
            routes=[
                Route(f"{base}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{base}/completions", self._completion, methods=["POST"]),
                Route(f"{base}/models", self._models),
                Route(f"{base}/{{rest:path}}", _nothing, methods=["GET", "POST"]),
                Route("/health", self._health),
            ],
        )

    async def _chat(self, request: Request) -> Response:
        return await self._call(
            request,
            openai_requests.read_chat,
            openai_answers.chat_answer,
            openai_answers.chat_chunks,
        )

    async def _completion(self, request: Request) -> Response:
        return await self._call(
            request,
            openai_requests.read_completion,
            openai_answers.completion_answer,
            openai_answers.completion_chunks,
        )

    async def _models(self, request: Request) -> Response:
        try:
            async with self._sessions.use(_key(request), _attempt(request)) as entry:
                run = entry.live.session.attempt.run
        except ApiError as error:
            return _refusal(error)
        card = {"id": run, "object": "model", "created": 0, "owned_by": "rollbook"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"incarnation": self._incarnation, "sessions": len(self._sessions)})

    async def _call(self, request: Request, read: Read, whole: Whole, chunks: Chunks) -> Response:
        try:
            ask = read(await _body(request))
            async with self._sessions.use(_key(request), _attempt(request)) as entry:
                with tracing.continued(await self._cause(request)), tracing.span("gateway call"):
                    answer = await _unless_gone(request, self._answer(entry, ask))
        except ApiError as error:
            return _refusal(error)
        except (psycopg.OperationalError, ObjectError) as error:
            logger.warning("out of reach: %s", error)
            return _refusal(ApiError(503, f"out of reach, try again: {error}", again=True))
        except ClientDisconnect:
            return Response(status_code=499)

        async def delivered() -> None:
            entry.delivered.add(answer.call)

        arrived = BackgroundTask(delivered)
        if ask.stream:
            events = openai_answers.stream(chunks(ask, answer))
            return Response(events, media_type="text/event-stream", background=arrived)
        # ASCII: what a model samples may hold half characters.
        text = json.dumps(whole(ask, answer), separators=(",", ":"))
        return Response(text, media_type="application/json", background=arrived)

    async def _cause(self, request: Request) -> Mapping[str, str]:
        """The span that a call belongs to: the program's, if it traces itself, or its group's."""
        if not tracing.is_on() or "traceparent" in request.headers:
            return request.headers
        return await self._sessions.book.cause(_attempt(request))

    async def _answer(self, entry: Entry, ask: Ask) -> Answered:
        """One answer; what is wrong with the attempt is written down before it is said."""
        live = entry.live
        try:
            return await live.answer(ask)
        except BudgetExhausted as limit:
            await live.note_refusal(limit.cause)
            raise _exhausted(limit.cause, live) from limit
        except Stopped as stopped:
            raise closed(f"was cancelled ({stopped})") from stopped
        except Fenced as error:
            # Another execution, or another gateway that wrote meanwhile: the ledger says which.
            raise await self._sessions.doubt(entry, error) from error
        except (Unusable, EngineError, LedgerError) as error:
            detail = f"sampling failed: {type(error).__name__}: {error}"
            await live.fail(detail)
            raise ApiError(500, detail, code="sampling_failed") from error


def _exhausted(cause: str, live: LiveSession) -> ApiError:
    if cause == "context":
        most = live.limits.context
        return ApiError(
            400,
            f"This model's maximum context length is {most} tokens. However, your messages "
            "resulted in more. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
    return ApiError(
        400,
        f"the rollout's budget is used up: {cause}; nothing more is sampled for it",
        code="rollout_budget_exhausted",
        param=cause,
    )


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Answered]) -> Answered:
    """Work for as long as the client waits for it.

    Raises:
        ClientDisconnect: it went away; what it had asked the engine is aborted.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _body(request: Request) -> object:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            raise ApiError(413, f"the request is larger than {LARGEST_BODY} bytes")
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is not JSON: {error}") from error
    return found


def _key(request: Request) -> bytes:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise ApiError(
            401, "send the session's key as a bearer token (OPENAI_API_KEY)", code="invalid_api_key"
        )
    return key_sha256(key.strip())


def _attempt(request: Request) -> AttemptIn:
    path = request.path_params
    return AttemptIn(
        run=path["run"], group=path["group"], sample=path["sample"], attempt=path["attempt"]
    )


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _nothing(request: Request) -> Response:
    path = request.path_params["rest"]
    return _refusal(
        ApiError(
            404,
            f"there is no /v1/{path} here; the gateway has chat/completions, completions, models",
            code="unknown_url",
        )
    )
