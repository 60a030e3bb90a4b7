"""Images from an environment to the engine: the store, the ledger and the wire are the real ones.

The engine is a stub that takes images as vLLM's generate endpoint does, and expands them.
"""

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from activities.album import Album
from activities.attempt import Attempts
from activities.chat import Chat
from activities.fleet import load
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.environments import Env, RolloutView
from domain.errors import EngineRefused
from domain.rollouts import Task
from domain.services import Services
from domain.tools import Message
from storage import images, segments
from storage.objects import ObjectStore
from tests.attempted import One, limited
from tests.seeing import png, seeing
from tests.stub_engine import StubEngine

SIZES = {"cat": 5, "dog": 9}


class Gallery(Env):
    """Shows the same picture twice, then another."""

    def __init__(self, mark: str) -> None:
        self.cat, self.dog = png(f"cat {mark}"), png(f"dog {mark}")

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": [self.cat, {"type": "text", "text": "?"}, self.cat]}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        if rollout.turns == 2:
            return None
        return [{"role": "user", "content": [self.dog]}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return 1.0


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    opened = EngineClient()
    yield opened
    await opened.aclose()


class Counting(ObjectStore):
    """Counts uploads."""

    puts = 0

    def put_new(self, key: str, body: bytes | Path, *, sha256: str) -> bool:
        self.puts += 1
        return super().put_new(key, body, sha256=sha256)


async def test_images_are_stored_once_and_reach_the_engine_whole(
    sampled_run: Callable[..., Any],
    engine: StubEngine,
    client: EngineClient,
    s3_services: Services,
    chat: Chat,
) -> None:
    store = Counting(s3_services)
    store.prepare()
    b = sampled_run(budget={"max_images": 3})
    env = Gallery(b.run)
    sizes = {env.cat.sha256: SIZES["cat"], env.dog.sha256: SIZES["dog"]}
    assert chat.image_id is not None
    (stop,) = chat.stop_ids
    engine.image_id, engine.image_tokens = chat.image_id, sizes.__getitem__
    engine.say = lambda body: [4, 4, stop] if body["sampling_params"]["max_tokens"] > 1 else [4]
    group = b.group()
    for sample in (0, 1):
        # Each in a process of its own, as far as what it remembers goes.
        sampler = Sampler(b.ledger, client, Router(b.ledger), Album(b.ledger, store))
        setup = One(Setup(config=b.config, source=env, chat=chat))
        attempts = Attempts(sampler, setup, worker="w1")  # type: ignore[arg-type]
        ref = await limited(60).run(attempts.run_attempt, b.key(group, sample))
        assert ref.status == "completed"
    assert store.puts == 2
    assert store.get(images.key(env.dog.sha256), sha256=env.dog.sha256) == env.dog.data
    rows = b.sql(
        "SELECT media_type, bytes FROM objects WHERE sha256 = %s", bytes.fromhex(env.cat.sha256)
    )
    assert rows == [{"media_type": "image/png", "bytes": len(env.cat.data)}]

    sent = [
        [(part["uuid"], base64.b64decode(part["url"].split(",")[1])) for part in r["content_parts"]]
        for r in engine.requests[:4]
    ]
    cat, dog = (env.cat.sha256, env.cat.data), (env.dog.sha256, env.dog.data)
    assert sent == [[cat, cat], [cat, cat], [cat, cat, dog], [cat, cat, dog]]
    assert [r["token_ids"].count(chat.image_id) for r in engine.requests[:4]] == [2, 2, 3, 3]
    assert {r["return_token_ids"] for r in engine.requests} == {True}

    one, two = (b.ledger.call(segments.read, b.run, group, s, 0) for s in (0, 1))
    assert [s.images for s in one] == [s.images for s in two]
    assert [list(s.prompt_ids) for s in one] == [list(s.prompt_ids) for s in two]
    assert [(i.sha256, i.length) for i in one[-1].images] == [
        *((env.cat.sha256, 5), (env.cat.sha256, 5), (env.dog.sha256, 9))
    ]
    for image in one[-1].images:
        shown = one[-1].prompt_ids[image.offset : image.offset + image.length]
        assert set(map(int, shown)) == {chat.image_id}
    (lengths,) = {tuple(b.attempt(group, s)["chain_lengths"]) for s in (0, 1)}
    assert lengths == (len(one[-1].prompt_ids) + len(one[-1].sampled_ids),)


async def test_an_expansion_that_fills_the_context_truncates_and_keeps_nothing(
    sampled_run: Callable[..., Any],
    engine: StubEngine,
    client: EngineClient,
    s3_services: Services,
    chat: Chat,
) -> None:
    store = ObjectStore(s3_services)
    store.prepare()
    b = sampled_run(budget={"max_images": 3, "max_context_tokens": 100})
    assert chat.image_id is not None
    engine.image_id, engine.image_tokens = chat.image_id, lambda _: 60
    group = b.group()
    sampler = Sampler(b.ledger, client, Router(b.ledger), Album(b.ledger, store))
    setup = One(Setup(config=b.config, source=Gallery(b.run), chat=chat))
    attempts = Attempts(sampler, setup, worker="w1")  # type: ignore[arg-type]
    await limited(60).run(attempts.run_attempt, b.key(group, 0))
    row = b.attempt(group, 0)
    assert (row["status"], row["truncation"], row["policy_tokens"]) == ("truncated", "context", 0)
    assert b.ledger.call(segments.read, b.run, group, 0, 0) == []


async def test_an_engine_without_the_capability_is_refused_before_it_loads_anything(
    sampled_run: Callable[..., Any], engine: StubEngine, client: EngineClient
) -> None:
    b = sampled_run(budget={"max_images": 1})
    with pytest.raises(EngineRefused, match=r"lacks 'images', which budget.max_images needs"):
        await load(b.ledger, client, b.run, 0, engine.url)
    assert engine.requests == []
