"""Images in conversations: by digest, one id each for us, as many as the engine says in the budget."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activities.answers import expansion
from activities.chat import Chat
from activities.play import play, rehearse
from domain.chains import merge
from domain.environments import Env, PromptSource, RolloutView
from domain.errors import ConfigError, EngineRefused, SourceBroken
from domain.images import Image, PlacedImage, compact
from domain.rollouts import Rollout, Segment, Status, Task
from domain.tools import Message
from tests.scripted import Scripted, config
from tests.seeing import MARK, png, seeing
from trainer.packing import pack

CAT, DOG = png("cat"), png("a dog")
TASK = Task("t", {})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return seeing(tmp_path_factory.mktemp("seeing"))


class Sees(Scripted):
    """Makes as many tokens of an image as its bytes."""

    def __init__(self, chat: Chat, *replies: str, **more: Any) -> None:
        super().__init__(chat, *replies, **more)
        self.asked: list[int] = []

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> Segment:
        self.asked.append(max_tokens or 0)
        segment = await super().sample(prompt_ids, max_tokens=max_tokens)
        sizes = {image.sha256: len(image.data) for image in self.kept}
        seen: list[int] = []
        places = []
        left = list(images)
        for token in prompt_ids:
            length = 1
            if token == self.chat_of.image_id:
                length = sizes[left[0]]
                places.append(PlacedImage(left.pop(0), len(seen), length))
            seen += [token] * length
        assert not left
        self.segments[-1] = replace(segment, prompt_ids=tuple(seen), images=tuple(places))
        return self.segments[-1]

    def again(self, *, segments: int, states: int) -> "Sees":
        other = Sees(self.chat_of)
        other.left, other.kept = list(self.left), list(self.kept)
        other.recorded, other.states = self.segments[:segments], self.states[:states]
        return other


class Gallery(Env):
    """Shows a picture, then another."""

    recovery = "stateless"

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": [{"type": "text", "text": "what? "}, CAT]}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        if rollout.turns == 2:
            return None
        return [{"role": "user", "content": [DOG, {"type": "text", "text": "and this?"}]}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return rollout.context_tokens


async def test_messages_carry_digests_and_the_record_what_the_model_saw(chat: Chat) -> None:
    recorder = Sees(chat, "a cat", "a dog")
    outcome = await play(Gallery(), TASK, recorder, config=config(max_images=2), chat=chat)
    assert outcome.status is Status.COMPLETED
    assert recorder.kept == [CAT, DOG]
    assert recorder.states[-1]["messages"][0]["content"] == [
        {"type": "text", "text": "what? "},
        {"type": "image", "sha256": CAT.sha256},
    ]
    last = recorder.segments[-1]
    assert [(p.sha256, p.length) for p in last.images] == [
        (CAT.sha256, len(CAT.data)),
        (DOG.sha256, len(DOG.data)),
    ]
    assert chat.image_id is not None
    seen = chat.tokenizer.decode(
        compact(list(last.prompt_ids), last.images, chat.image_id), skip_special_tokens=False
    )
    assert f"what? {MARK}[assistant]a cat" in seen
    assert f"[user]{MARK}and this?[assistant]" in seen
    assert len(merge(recorder.segments)) == 1
    (chain,) = merge(recorder.segments)
    assert outcome.reward is not None
    assert outcome.reward.value == len(chain) == len(last.prompt_ids) + len(last.sampled_ids)  # type: ignore[union-attr]


async def test_one_token_tells_what_an_image_is_and_the_turn_goes_on(chat: Chat) -> None:
    recorder = Sees(chat, "a cat", "a dog")
    budget: dict[str, Any] = {"max_images": 2, "segment_tokens": 50}
    await play(Gallery(), TASK, recorder, config=config(**budget), chat=chat)
    assert recorder.asked == [1, 50, 1, 50]


async def test_the_context_is_what_the_engine_expands(chat: Chat) -> None:
    recorder = Sees(chat, "a very long answer indeed", ended=False)
    prompt = len(chat.prompt([{"role": "user", "content": "what? x"}]))
    room = prompt - 1 + len(CAT.data) + 7
    c = config(max_images=2, max_context_tokens=room)
    outcome = await play(Gallery(), TASK, recorder, config=c, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "context")
    assert recorder.asked == [1, 6]
    assert [len(s.prompt_ids) + len(s.sampled_ids) for s in recorder.segments] == [room - 6, room]


@pytest.mark.parametrize("segments", [1, 2, 3])
async def test_an_unfinished_rollout_is_taken_up_token_exactly(chat: Chat, segments: int) -> None:
    whole = Sees(chat, "a cat", "a dog")
    c = config(max_images=2)
    await play(Gallery(), TASK, whole, config=c, chat=chat)
    first = Sees(chat, "a cat", "a dog")
    first.fail_at = (segments, RuntimeError("died"))
    await play(Gallery(), TASK, first, config=c, chat=chat)
    second = first.again(segments=segments, states=len(first.states))
    outcome = await play(Gallery(), TASK, second, config=c, chat=chat)
    assert outcome.status is Status.COMPLETED
    assert [*first.segments, *second.segments] == whole.segments


async def test_images_over_the_budget_truncate(chat: Chat) -> None:
    c = config(max_images=1)
    outcome = await play(Gallery(), TASK, Sees(chat, "a cat"), config=c, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "images")


async def test_undeclared_images_are_refused_before_sampling_with_the_capability(
    chat: Chat,
) -> None:
    recorder = Sees(chat, "a cat")
    with pytest.raises(SourceBroken, match=r"needs 'images'; set budget.max_images"):
        await play(Gallery(), TASK, recorder, config=config(), chat=chat)
    assert recorder.asked == []


@pytest.mark.parametrize(
    ("said", "counts"), [(f"see {MARK}", "2 images has 3"), (MARK, "1 images has 2")]
)
async def test_the_token_of_an_image_without_one_ends_the_rollout(
    chat: Chat, said: str, counts: str
) -> None:
    outcome = await play(
        Gallery(), TASK, Sees(chat, said, "a dog"), config=config(max_images=2), chat=chat
    )
    assert outcome.status is Status.INFRA_ERROR
    assert f"{counts} of the tokens" in outcome.detail


async def test_a_prompt_of_a_data_set_names_a_file(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(CAT.data)
    part = {"type": "image", "path": "cat.png"}
    task = Task("t", {"prompt": [{"role": "user", "content": [part]}]})
    c = config(max_images=1).model_copy(update={"root": str(tmp_path)})
    source = PromptSource(lambda answer, task: 1.0)
    rehearse(source, [task], config=c, chat=chat)
    recorder = Sees(chat, "cat")
    await play(source, task, recorder, config=c, chat=chat)
    assert recorder.kept == [CAT]
    absent = Task("t", {"prompt": [{"role": "user", "content": [{**part, "path": "dog.png"}]}]})
    with pytest.raises(ConfigError, match=r"names the image .*dog.png"):
        rehearse(source, [absent], config=c, chat=chat)


def test_another_image_starts_another_chain() -> None:
    def segment(images: tuple[PlacedImage, ...], *prompt: int) -> Segment:
        return Segment(prompt, (9,), (0.0,), "stop", 0, images=images)

    cat, dog = PlacedImage(CAT.sha256, 0, 2), PlacedImage(DOG.sha256, 0, 2)
    assert len(merge([segment((cat,), 1, 1), segment((cat,), 1, 1, 9, 3)])) == 1
    assert len(merge([segment((cat,), 1, 1), segment((dog,), 1, 1, 9, 3)])) == 2


def test_rows_say_where_their_images_stand() -> None:
    def rollout(sample: int, *images: PlacedImage) -> Rollout:
        segment = Segment((1, 4, 4, 2), (9,), (0.0,), "stop", 0, images=images)
        return Rollout("t", 0, sample, 0, [segment], Status.COMPLETED, float(sample))

    cat, dog = PlacedImage(CAT.sha256, 1, 2), PlacedImage(DOG.sha256, 1, 2)
    packed = pack([rollout(0, cat), rollout(1, dog), rollout(2)], 10, rows=2)
    shown = {}
    for (row, column, length), digest in zip(
        packed["image_places"], packed["image_sha256"], strict=True
    ):
        assert packed["input_ids"][row, column : column + length].tolist() == [4, 4]
        shown[int(packed["rollout_index"][row, column])] = bytes(digest).hex()
    assert shown == {0: CAT.sha256, 1: DOG.sha256}
    assert "image_places" not in pack([rollout(0)], 10)


@pytest.mark.parametrize("data", [b"", b"GIF", b"plain text", "\x89PNG"])
def test_what_is_no_image_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="PNG, JPEG, GIF or WebP"):
        Image(data)


def test_media_types_are_read_from_the_bytes() -> None:
    kinds = [b"\x89PNG..", b"\xff\xd8\xff..", b"GIF89a", b"RIFF\0\0\0\0WEBP"]
    assert [Image(data).media_type for data in kinds] == [
        *("image/png", "image/jpeg", "image/gif", "image/webp")
    ]


ASKED = [5, 7, 6, 7, 8]


def answer(seen: list[int], *places: tuple[int, int]) -> dict[str, Any]:
    found = [{"offset": offset, "length": length} for offset, length in places]
    return {"prompt_token_ids": seen, "mm_placeholders": {"image": found}}


def test_an_expansion_keeps_every_other_id() -> None:
    said = answer([5, 1, 2, 3, 6, 4, 8], (1, 3), (5, 1))
    assert expansion("e", ASKED, 2, said) == ((5, 1, 2, 3, 6, 4, 8), ((1, 3), (5, 1)))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, "prompt_token_ids"),
        ({"prompt_token_ids": ASKED}, "placed 0 images"),
        (answer([5, 7, 7, 6, 7, 8], (1, 2)), "placed 1 images"),
        (answer([5, 7, 7, 6, 7, 9], (1, 2), (4, 1)), "another prompt"),
        (answer([5, 7, 7, 7, 6, 7, 8], (1, 2), (5, 1)), "another prompt"),  # one id too many
        (answer([5, 7, 7, 6, 7], (1, 2), (4, 1)), "another prompt"),
        (answer([5, 7, 7, 6, 7, 8], (4, 1), (1, 2)), "another prompt"),
        (answer([5, 6, 7, 8], (1, 0), (2, 1)), "another prompt"),
    ],
)
def test_an_engine_that_saw_another_prompt_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        expansion("e", ASKED, 2, said)
