"""Images that a program sends: as data URLs to the gateway, by digest from there on.

The engine is a stub that expands them as vLLM does; `tests/vllm/test_images.py` has a real one.
"""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from activities.chat import Chat
from domain.images import Image
from domain.services import Services
from storage import images, segments
from storage.objects import ObjectStore
from tests.gateways import Running, Script, gateway
from tests.integration.rollouts.conftest import Bench
from tests.seeing import png, seeing
from tests.stub_engine import StubEngine

CAT, DOG = png("a cat"), png("a dog")
SIZES = {CAT.sha256: 5, DOG.sha256: 9}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def store(s3_services: Services) -> ObjectStore:
    opened = ObjectStore(s3_services)
    opened.prepare()
    return opened


def sees(engine: StubEngine, chat: Chat, *texts: str) -> Script:
    script = Script(chat, texts)
    assert chat.image_id is not None
    engine.say, engine.image_id, engine.image_tokens = script, chat.image_id, SIZES.__getitem__
    return script


def shows(*parts: Image | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": part.url}}
            for part in parts
        ],
    }


async def asked(gate: Running, group: int, messages: list[Any], **more: Any) -> Any:
    async with gate.client(group, 0) as program:
        return await program.chat.completions.create(model="m", messages=messages, **more)


async def test_a_conversation_with_images_survives_the_gateway_token_exactly(
    sampled_run: Callable[..., Bench], engine: StubEngine, chat: Chat, store: ObjectStore
) -> None:
    script = sees(engine, chat, "a cat", "a dog", "yes")
    b = sampled_run(budget={"max_images": 2})
    group = b.group()
    said: list[Any] = [shows("what? ", CAT)]
    async with gateway(b, chat, store=store) as gate, gate.client(group, 0) as program:
        ask = program.chat.completions.create
        first = await ask(model="m", messages=said, extra_body={"return_token_ids": True})
        said += [first.choices[0].message, shows(DOG, "and this?")]
        await ask(model="m", messages=said)
        opened = program.api_key
        url = str(program.base_url)
    said += [{"role": "assistant", "content": "a dog"}, {"role": "user", "content": "sure?"}]
    async with (
        gateway(b, chat, store=store) as again,  # it knows only what the ledger and the store hold
        openai.AsyncOpenAI(base_url=url.replace(gate.url, again.url), api_key=opened) as program,
    ):
        third = await program.chat.completions.create(model="m", messages=said)
    assert third.choices[0].message.content == "yes"

    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert [[(i.sha256, i.length) for i in s.images] for s in read][-1] == [
        (CAT.sha256, 5),
        (DOG.sha256, 9),
    ]
    # One token tells how many an image is; then the turn goes on.
    assert [len(s.sampled_ids) for s in read] == [1, 5, 1, 5, 4]
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert {p.chain for p in places} == {0}
    assert [p.context_start for p in places][1:] == [
        len(s.prompt_ids) + len(s.sampled_ids) for s in read[:-1]
    ]
    # What programs are told of is what the model saw.
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(read[0].prompt_ids)
    assert first.model_extra is not None
    assert first.model_extra["prompt_token_ids"] == list(map(int, read[0].prompt_ids))
    # Engines get the bytes, the ledger has the digests.
    assert [p["url"] for p in engine.requests[-1]["content_parts"]] == [CAT.url, DOG.url]
    assert script.asked[-1].count(chat.image_id or -1) == 2
    assert store.get(images.key(CAT.sha256), sha256=CAT.sha256) == CAT.data
    stored = b.one("SELECT count(*) AS n FROM gateway_calls WHERE asked::text LIKE %s", "%base64%")
    assert stored["n"] == 0


async def test_what_the_images_become_counts_in_the_context(
    sampled_run: Callable[..., Bench], engine: StubEngine, chat: Chat, store: ObjectStore
) -> None:
    sees(engine, chat, "a cat that goes on and on")
    asked_for = len(chat.prompt([{"role": "user", "content": [CAT.handle]}]))
    room = asked_for - 1 + SIZES[CAT.sha256] + 7
    b = sampled_run(budget={"max_images": 1, "max_context_tokens": room})
    group = b.group()
    async with gateway(b, chat, store=store) as gate:
        answer = await asked(gate, group, [shows(CAT)])
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == room
    engine.image_tokens = lambda _: room
    group = b.group()
    async with gateway(b, chat, store=store) as gate:
        with pytest.raises(openai.BadRequestError) as caught:
            await asked(gate, group, [shows(CAT)])
    assert caught.value.code == "context_length_exceeded"
    assert b.ledger.call(segments.read, b.run, group, 0, 0) == []


@pytest.mark.parametrize(
    ("budget", "messages", "code", "words"),
    [
        ({}, [shows(CAT)], "unsupported_parameter", "need 'images'.*set budget.max_images"),
        ({"max_images": 1}, [shows(CAT, DOG)], "rollout_budget_exhausted", "used up: images"),
        (
            {"max_images": 1},
            [{"role": "user", "content": [{"type": "image_url", "image_url": "https://x/cat.png"}]}],
            None,
            r"must come as a data URL .*https://x/cat.png.*fetches nothing",
        ),
        (
            {"max_images": 1},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a;base64,!"}}]}],
            None,
            "base64 cannot be read",
        ),
        (
            {"max_images": 1},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a;base64,aGk="}}]}],
            None,
            "PNG, JPEG, GIF or WebP",
        ),
    ],
    ids=["undeclared", "too many", "elsewhere", "no base64", "no image"],
)  # fmt: skip
async def test_images_that_cannot_be_sent_are_refused_in_words(
    sampled_run: Callable[..., Bench],
    engine: StubEngine,
    chat: Chat,
    store: ObjectStore,
    budget: dict[str, int],
    messages: list[Any],
    code: str | None,
    words: str,
) -> None:
    sees(engine, chat, "a cat")
    b = sampled_run(budget=budget)
    group = b.group()
    async with gateway(b, chat, store=store) as gate:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await asked(gate, group, messages)
    assert caught.value.code == code
    assert engine.requests == []


async def test_a_model_that_reads_text_says_so(
    sampled_run: Callable[..., Bench],
    engine: StubEngine,
    printable_chat: Chat,
    store: ObjectStore,
) -> None:
    b = sampled_run(budget={"max_images": 1})
    group = b.group()
    async with gateway(b, printable_chat, store=store) as gate:
        with pytest.raises(
            openai.BadRequestError, match="need 'images': its model reads text only"
        ):
            await asked(gate, group, [shows(CAT)])
    assert engine.requests == []


async def test_the_token_of_an_image_in_a_text_ends_the_attempt(
    sampled_run: Callable[..., Bench], engine: StubEngine, chat: Chat, store: ObjectStore
) -> None:
    sees(engine, chat, "a cat")
    b = sampled_run(budget={"max_images": 1})
    group = b.group()
    mark = chat.tokenizer.id_to_token(chat.image_id or 0)
    async with gateway(b, chat, store=store) as gate:
        with pytest.raises(openai.InternalServerError, match="1 images has 2 of the tokens"):
            await asked(gate, group, [shows(CAT, f"or {mark}")])
    assert engine.requests == []
