"""An engine that answers what a test wants, over real HTTP; for tests whose subject is not the engine."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from domain.capabilities import BUILT_IN, IMAGES
from rollbook.stack import ports

STOP = 2


@dataclass
class StubEngine:
    """Samples `tokens` ids (or as many as asked for) and stops; the knobs change while it runs."""

    url: str
    tokens: int | None = 3
    """None: as many as asked for, finish reason `length`."""
    status: int = 200
    failures: int = 0
    """Answer 503 to so many further requests."""
    forgotten: int = 0
    """Answer so many further requests as an engine that has restarted and holds nothing."""
    logprob: float = -0.5
    say: Callable[[dict[str, Any]], Sequence[int]] | None = None
    """What is sampled for a request, cut to what it asks for; instead of `tokens`."""
    delay_s: float = 0.0
    drop_logprobs: bool = False
    hold: asyncio.Event | None = None
    """Requests wait for it; an aborted one answers with what it has: two ids."""
    hold_from: int = 0
    """So many requests are answered at once all the same."""
    kv_version: Callable[[int], int | None] = lambda version: version
    spans: Callable[[int, int], list[tuple[int, int]]] = lambda version, number: [(version, number)]
    """`(version, end)` of the spans of an answer, from the version asked for and its length."""
    image_tokens: Callable[[str], int] | None = None
    """How many tokens it makes of an image, by its digest; None: it takes no images."""
    image_id: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    keep_requests: bool = True
    aborted: list[str] = field(default_factory=list)
    running: int = 0
    _aborts: dict[str, asyncio.Event] = field(default_factory=dict)

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if self.keep_requests:
            self.requests.append(body)
        if self.failures > 0:
            self.failures -= 1
            return Response("try again", status_code=503)
        if self.forgotten > 0:
            self.forgotten -= 1
            told = {"message": "it is not resident", "type": "UnknownPolicy", "code": 404}
            return Response(json.dumps({"error": told}), status_code=404)
        if self.status != 200:
            return Response("the engine's own words", status_code=self.status)
        wanted = body["sampling_params"]["max_tokens"]
        number = wanted if self.tokens is None else min(self.tokens, wanted)
        reason = "length" if number == wanted and self.tokens is None else "stop"
        held = len(self.requests) > self.hold_from
        if held and self.hold is not None and not self.hold.is_set():
            abort = self._aborts.setdefault(body["request_id"], asyncio.Event())
            self.running += 1
            waits = [asyncio.ensure_future(e.wait()) for e in (self.hold, abort)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.running -= 1
                for wait in waits:
                    wait.cancel()
            if abort.is_set():
                number, reason = 2, "abort"
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        ids = [100 + n % 50 for n in range(number)]
        if self.say is not None:
            ids = list(self.say(body))[: 2 if reason == "abort" else wanted]
            number = len(ids)
            ended = ids and ids[-1] in body["sampling_params"]["stop_token_ids"]
            reason = reason if reason == "abort" else "stop" if ended else "length"
        elif reason == "stop":
            ids[-1] = STOP
        version = int(body["model"].rpartition("@")[2])
        ends = self.spans(version, number)
        starts = [0, *(end for _, end in ends)]
        answer = {
            "request_id": body["request_id"],
            "usage": {"prompt_tokens_details": {"cached_tokens": len(body["token_ids"]) // 2}},
            "choices": [
                {
                    "finish_reason": reason,
                    "token_ids": ids,
                    "logprobs": {
                        "content": []
                        if self.drop_logprobs
                        else [{"token_id": i, "logprob": self.logprob} for i in ids]
                    },
                    "weight_versions": [
                        {"version": str(v), "start": start, "end": end}
                        for (v, end), start in zip(ends, starts, strict=False)
                    ],
                    "kv_version": self.kv_version(version),
                }
            ],
        }
        if "content_parts" in body:
            answer |= self._expanded(body)
        return Response(json.dumps(answer), media_type="application/json")

    def _expanded(self, body: dict[str, Any]) -> dict[str, Any]:
        """Each image token becomes as many as its image takes, as vLLM does and tells it."""
        assert self.image_tokens is not None
        digests = iter([part["uuid"] for part in body["content_parts"]])
        seen: list[int] = []
        places = []
        for token in body["token_ids"]:
            length = self.image_tokens(next(digests)) if token == self.image_id else 1
            if token == self.image_id:
                places.append({"offset": len(seen), "length": length})
            seen += [token] * length
        return {"prompt_token_ids": seen, "mm_placeholders": {"image": places}}

    async def abort(self, request: Request) -> Response:
        for name in (await request.json())["request_ids"]:
            plain = name.removeprefix("generate-tokens-")
            self.aborted.append(plain)
            self._aborts.setdefault(plain, asyncio.Event()).set()
        return Response("{}", media_type="application/json")

    async def health(self, _: Request) -> Response:
        body = {"incarnation": 1, "max_resident": 4, "policies": {}, "running": 0, "waiting": 0}
        sees = () if self.image_tokens is None else (IMAGES,)
        body |= {"capabilities": [*BUILT_IN, *sees]}
        return Response(json.dumps(body), media_type="application/json")


def server_of(engine: StubEngine) -> uvicorn.Server:
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", engine.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", engine.abort, methods=["POST"]),
            Route("/health", engine.health),
        ]
    )
    port = int(engine.url.rpartition(":")[2])
    return uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")
    )


@asynccontextmanager
async def stub_engine() -> AsyncIterator[StubEngine]:
    """A stub engine on a free port of this machine, in this event loop."""
    engine = StubEngine(f"http://127.0.0.1:{ports.choose(0)}")
    server = server_of(engine)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield engine
    finally:
        if engine.hold is not None:
            engine.hold.set()
        # Its clients may have been killed: their connections end here, not in the collector.
        for connection in list(server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        server.force_exit = server.should_exit = True
        await serving


if __name__ == "__main__":
    # A process of its own, where the test's process is what is measured: tokens as asked for.
    delay_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    server_of(StubEngine(sys.argv[1], tokens=None, keep_requests=False, delay_s=delay_s)).run()
