"""Images through all the real parts: store, ledger, attempt, front, and a vLLM that sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from activities.album import Album
from activities.attempt import Attempts
from activities.chat import Chat
from activities.inference import Crossing, EngineClient, Generated
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.capabilities import IMAGES
from domain.environments import Env, RolloutView
from domain.images import Image
from domain.messages import AttemptRef
from domain.rollouts import Segment, Task
from domain.services import Services
from domain.tools import Message
from storage import images, segments
from storage.objects import ObjectStore
from tests.attempted import One, limited, with_engines
from tests.gateways import gateway
from tests.integration.engine.lab import Weights, sampling
from tests.integration.rollouts.conftest import Bench
from tests.vllm import sights
from tests.vllm.lab import Lab

EXACT = 1e-4
WIDE = sights.picture((200, 30, 20), 56, 28)
TALL = sights.picture((20, 60, 220), 28, 84)
OTHER = sights.picture((20, 220, 60), 28, 84)
HOLD = Crossing(kv_max_staleness=1, refill=False)


@dataclass(frozen=True)
class Seer:
    """The model: how it is spoken to, and two versions of its weights."""

    chat: Chat
    versions: tuple[Weights, Weights]


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    folder = tmp_path_factory.mktemp("seeing")
    config = sights.materialise(folder)
    return Seer(Chat.open(folder), (sights.weights(config, 0), sights.weights(config, 1)))


async def serve(lab: Lab, policy: str, weights: Weights, **how: Any) -> None:
    """Load it. The probe is left out: it is text, and says nothing about what a model sees."""
    await lab.serve(policy, weights, probe=None, **how)


def error(weights: Weights, found: Segment | Generated, shown: Sequence[Image]) -> float:
    """How far recorded log-probabilities are from a plain forward over what the model saw."""
    assert found.prompt_ids is not None
    wanted = sights.logprobs(weights, found.prompt_ids, found.sampled_ids, shown)
    return max(abs(float(a) - b) for a, b in zip(found.logprobs, wanted, strict=True))


class Gallery(Env):
    """Shows the same picture twice, then another."""

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": [WIDE, {"type": "text", "text": " or "}, WIDE]}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        if rollout.turns == 2:
            return None
        return [{"role": "user", "content": [TALL, {"type": "text", "text": "and this?"}]}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return float(rollout.context_tokens)


class Counting(ObjectStore):
    """Counts what is uploaded."""

    puts = 0

    def put_new(self, key: str, body: bytes | Path, *, sha256: str) -> bool:
        self.puts += 1
        return super().put_new(key, body, sha256=sha256)


@pytest.fixture
def seen_run(make: Callable[..., Bench], sighted: Lab) -> Callable[..., Bench]:
    """Makes a run whose version 0 the vLLM behind the front is said to hold."""

    def create(**budget: Any) -> Bench:
        b = make(
            budget={"max_turns": 2, "max_generated_tokens": 400, "max_images": 3} | budget,
            trainer={"width": sights.CONTEXT},
        )
        with_engines(b, sighted.url)
        return b

    return create


async def play(
    b: Bench, client: EngineClient, store: ObjectStore, chat: Chat, group: int, sample: int
) -> AttemptRef:
    """One rollout, in a process of its own as far as what it remembers goes."""
    sampler = Sampler(b.ledger, client, Router(b.ledger), Album(b.ledger, store))
    setup = One(Setup(config=b.config, source=Gallery(), chat=chat))
    attempts = Attempts(sampler, setup, worker="w1")  # type: ignore[arg-type]
    ref: AttemptRef = await limited(60).run(attempts.run_attempt, b.key(group, sample))
    return ref


async def test_what_a_vllm_made_of_the_images_is_recorded_and_counted(
    seen_run: Callable[..., Bench],
    sighted: Lab,
    client: EngineClient,
    s3_services: Services,
    seer: Seer,
) -> None:
    store = Counting(s3_services)
    store.prepare()
    b = seen_run(segment_tokens=4)
    await serve(sighted, f"{b.run}@0", seer.versions[0], sha256=bytes(32).hex())
    assert IMAGES in (await client.health(sighted.url)).capabilities
    group = b.group()
    for sample in (0, 1):
        assert (await play(b, client, store, seer.chat, group, sample)).status == "completed"
    assert store.puts == 2  # two pictures, sent in ten requests

    sizes = {image.sha256: sights.tokens(image) for image in (WIDE, TALL)}
    assert sizes[WIDE.sha256] != sizes[TALL.sha256]
    for sample in (0, 1):
        read = b.ledger.call(segments.read, b.run, group, sample, 0)
        shown = [[i.sha256 for i in segment.images] for segment in read]
        assert shown[0] == [WIDE.sha256] * 2
        assert shown[-1] == [WIDE.sha256, WIDE.sha256, TALL.sha256]
        assert len(read[0].sampled_ids) == 1  # one token, to learn how many the images are
        for segment in read:
            assert [i.length for i in segment.images] == [sizes[i.sha256] for i in segment.images]
            kept = [Image(store.get(images.key(i.sha256), sha256=i.sha256)) for i in segment.images]
            assert error(seer.versions[0], segment, kept) < EXACT
        last = read[-1]
        # With another picture of that size it would have been another distribution.
        assert error(seer.versions[0], last, [WIDE, WIDE, OTHER]) > 0.01
        row = b.attempt(group, sample)
        whole = len(last.prompt_ids) + len(last.sampled_ids)
        assert (row["chain_lengths"], row["reward"]) == ([whole], whole)
        assert whole > sum(sizes[i.sha256] for i in last.images)
        assert max(s.cached_prompt_tokens for s in read) > sizes[WIDE.sha256]


async def test_what_a_vllm_makes_of_an_image_can_fill_the_context(
    seen_run: Callable[..., Bench],
    sighted: Lab,
    client: EngineClient,
    s3_services: Services,
    seer: Seer,
) -> None:
    store = ObjectStore(s3_services)
    store.prepare()
    room = 2 * sights.tokens(WIDE)
    b = seen_run(max_context_tokens=room)
    await serve(sighted, f"{b.run}@0", seer.versions[0], sha256=bytes(32).hex())
    group = b.group()
    await play(b, client, store, seer.chat, group, 0)
    row = b.attempt(group, 0)
    assert (row["status"], row["truncation"], row["policy_tokens"]) == ("truncated", "context", 0)
    assert b.ledger.call(segments.read, b.run, group, 0, 0) == []


async def test_a_program_shows_an_image_to_a_vllm_through_the_gateway(
    seen_run: Callable[..., Bench], sighted: Lab, s3_services: Services, seer: Seer
) -> None:
    store = ObjectStore(s3_services)
    store.prepare()
    b = seen_run()
    await serve(sighted, f"{b.run}@0", seer.versions[0], sha256=bytes(32).hex())
    group = b.group()
    shows: Any = {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is "},
            {"type": "image_url", "image_url": {"url": WIDE.url}},
        ],
    }
    async with (
        gateway(b, seer.chat, store=store) as gate,
        gate.client(group, 0) as program,
    ):
        answer = await program.chat.completions.create(model="m", messages=[shows])
    first, *_ = read = gate.read(group)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(first.prompt_ids)
    assert answer.usage.completion_tokens == sum(len(s.sampled_ids) for s in read)
    for segment in read:
        assert [(i.sha256, i.length) for i in segment.images] == [
            (WIDE.sha256, sights.tokens(WIDE))
        ]
        assert error(seer.versions[0], segment, [WIDE]) < EXACT


async def test_what_an_older_version_saw_in_an_image_never_reaches_a_newer_one(
    sighted: Lab, client: EngineClient, seer: Seer
) -> None:
    """A swap that holds KV: vLLM itself would die of the first image that both versions see."""
    mark = seer.chat.image_id
    assert mark is not None
    ids = [*seer.chat.encode("what is "), mark, *seer.chat.encode("?")]
    requests = count()

    async def ask(policy: str, **how: Any) -> Generated:
        return await client.generate(
            sighted.url,
            policy,
            ids,
            sampling(max_tokens=8, **how),
            request_id=f"seen{next(requests)}",
            salt="run",
            images=[{"type": "image_url", "url": WIDE.url, "uuid": WIDE.sha256}],
        )

    await serve(sighted, "seen@0", seer.versions[0])
    assert error(seer.versions[0], await ask("seen@0"), [WIDE]) < EXACT
    await serve(sighted, "seen@1", seer.versions[1], crossing=HOLD)
    held = await ask("seen@1", kv_max_staleness=1)
    assert (held.kv_version, held.cached_prompt_tokens > 0) == (0, True)
    assert error(seer.versions[1], held, [WIDE]) > 0.01
    fresh = await ask("seen@1")
    assert (fresh.kv_version, fresh.cached_prompt_tokens) == (1, 0)
    assert error(seer.versions[1], fresh, [WIDE]) < EXACT
