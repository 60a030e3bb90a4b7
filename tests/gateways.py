"""A gateway over real HTTP, in this event loop, for one run; and a model that says what it is told."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from activities.access import key_sha256, session_path
from activities.album import Album
from activities.chat import Chat
from activities.gateway import Gateway
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.sessions import LedgerBook, Sessions
from domain.config import RunConfig
from domain.rollouts import Segment
from rollbook.gateway import make_server
from rollbook.stack import ports
from storage import segments, sessions
from storage.objects import ObjectStore

Make = Callable[..., Any]

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HELLO: Any = [{"role": "user", "content": "hello"}]


@dataclass
class OneFormat:
    """The formats of a gateway that knows one run."""

    config: RunConfig
    chat: Chat

    async def get(self, run: str) -> tuple[RunConfig, Chat]:
        return self.config, self.chat


@dataclass
class Running:
    """A gateway that serves."""

    bench: Any
    chat: Chat
    url: str
    sessions: Sessions

    def key(self, group: int, sample: int, attempt: int = 0) -> str:
        """Start an attempt, and give it a key as a worker would."""
        b = self.bench
        started = b.start(group, sample, attempt)
        key = secrets.token_urlsafe(8)
        b.ledger.call(sessions.issue, b.key(group, sample, attempt), started.fence, key_sha256(key))
        return key

    def base_url(self, group: int, sample: int, attempt: int = 0) -> str:
        return self.url + session_path(self.bench.key(group, sample, attempt))

    @asynccontextmanager
    async def client(
        self, group: int, sample: int, *, retries: int = 0
    ) -> AsyncIterator[AsyncOpenAI]:
        """The openai client of a program that was given an attempt's session."""
        async with AsyncOpenAI(
            base_url=self.base_url(group, sample),
            api_key=self.key(group, sample),
            max_retries=retries,
        ) as opened:
            yield opened

    def read(self, group: int, sample: int = 0) -> list[Segment]:
        b = self.bench
        found: list[Segment] = b.ledger.call(segments.read, b.run, group, sample, 0)
        return found


@asynccontextmanager
async def gateway(
    bench: Any, chat: Chat, *, port: int = 0, store: ObjectStore | None = None
) -> AsyncIterator[Running]:
    """Serve the bench's run; leaving ends it at once, as a kill would."""
    engines = EngineClient()
    album = None if store is None else Album(bench.ledger, store)
    sampler = Sampler(bench.ledger, engines, Router(bench.ledger), album)
    opened = Sessions(LedgerBook(sampler, OneFormat(bench.config, chat)))  # type: ignore[arg-type]
    port = port or ports.choose(0)
    server = make_server(Gateway(opened), host="127.0.0.1", port=port)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield Running(bench, chat, f"http://127.0.0.1:{port}", opened)
    finally:
        for connection in list(server.server_state.connections):
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        server.force_exit = server.should_exit = True
        await serving
        await engines.aclose()


@dataclass
class Script:
    """What the model says, in the order in which it is asked; each text is ended by EOS."""

    chat: Chat
    texts: Sequence[str]
    asked: list[list[int]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    """What a cut reply still has to say."""

    def __call__(self, body: dict[str, Any]) -> list[int]:
        self.asked.append(body["token_ids"])
        (eos,) = self.chat.stop_ids
        ids = self.left or [*self.chat.encode(self.texts[self._number()]), eos]
        self.left = ids[body["sampling_params"]["max_tokens"] :]
        self._said += not self.left
        return ids

    _said: int = 0

    def _number(self) -> int:
        return min(self._said, len(self.texts) - 1)


def call(name: str, **arguments: Any) -> str:
    """How the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def flat(ids: Any) -> list[int]:
    """Recorded ids as plain numbers."""
    return [int(i) for i in ids]


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    """Wait for what an engine or a database shows."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - they have no event
            await asyncio.sleep(0.01)
