"""What was said in a gateway session, found again by what a request says was said.

Programs send the whole history with every request. Here it is recognised by a digest of each of its
prefixes: the longest one that ends in an answer of ours is continued, and its ids are kept exactly.
A history that differs anywhere before that answer is another one. Ids of a conversation lie in one
growing buffer; a conversation that is continued twice is copied the second time.
"""

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

from activities.openai_messages import Json, identity
from domain.images import PlacedImage
from domain.rollouts import Numbers, Segment
from domain.tools import Message

Digest = bytes


@dataclass(slots=True)
class Turn:
    """One call: the ids it was asked on, and what was sampled."""

    ids: "array[int]"
    """The conversation's buffer; this turn's part of it ends at `end`."""
    prompt: int
    """Length of the prompt."""
    end: int
    added: Json
    """What the request added to the conversation."""
    after: int | None = None
    """The call that it goes on from."""
    call: int | None = None
    """Number of its first segment; None while nothing is recorded."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    cached: int = 0
    images: Sequence[str] = ()
    """Digests of the images in the prompt, each of which is one of its ids."""
    places: tuple[PlacedImage, ...] = ()
    """Where an engine put them, once one was asked."""
    seen: Numbers = ()
    """The prompt as the model saw it, where it holds images."""
    finish: str | None = None
    """None until it is finished: being sampled, or cut off when the gateway died."""

    @property
    def context(self) -> "array[int]":
        """Everything so far: what the next request sends."""
        return self.ids[: self.end]

    @property
    def grown(self) -> int:
        """By how many tokens the images make the context longer than its ids."""
        return sum(place.length - 1 for place in self.places)

    @property
    def unmeasured(self) -> bool:
        """There are images of which no engine has said how many tokens they are."""
        return len(self.places) < len(self.images)

    @property
    def sampled(self) -> list[int]:
        """What was sampled."""
        return self.ids[self.prompt : self.end].tolist()

    def extend(self, sampled: Numbers, logprobs: Numbers) -> None:
        """Append what a request sampled."""
        self.ids = _ending(self.ids, self.end)
        self.ids.extend(int(token) for token in sampled)
        self.logprobs.extend(float(logprob) for logprob in logprobs)
        self.end = len(self.ids)

    def look(self, segment: Segment) -> None:
        """Learn what the model saw of the images."""
        if segment.images:
            self.places = segment.images
            self.seen = self.seen if len(self.seen) else segment.prompt_ids

    @staticmethod
    def first(prompt: Numbers, added: Json) -> "Turn":
        """A turn that begins a conversation."""
        ids = array("i", (int(token) for token in prompt))
        return Turn(ids, prompt=len(ids), end=len(ids), added=added)

    def followed_by(self, prompt: Numbers, added: Json) -> "Turn":
        """The next turn, whose prompt begins with this one's ids."""
        ids = _ending(self.ids, self.end)
        ids.extend(int(token) for token in prompt[self.end :])
        end = len(ids)
        return Turn(ids, prompt=end, end=end, added=added, after=self.call, places=self.places)


@dataclass(frozen=True)
class Question:
    """What determines a request's prompt: `messages` and `tools`, `text`, or `ids`."""

    asked: Json

    @property
    def digest(self) -> Digest:
        """Of the whole."""
        if "messages" in self.asked:
            return self.prefixes[-1]
        return _text(self.asked["text"]) if "text" in self.asked else _hash(b"ids", self.asked)

    @cached_property
    def prefixes(self) -> list[Digest]:
        """Of the tools alone, then with one message more each."""
        return list(_prefixes(self.asked))


class Histories:
    """The turns of one session."""

    def __init__(self) -> None:
        self._answered: dict[Digest, Turn] = {}
        self._owed: dict[Digest, list[Turn]] = {}
        self._lengths: set[int] = set()
        """Of known texts."""

    def continued(self, question: Question) -> tuple[Turn, Json] | None:
        """The newest answer that a request goes on from, and what the request adds to it."""
        asked = question.asked
        if "text" in asked:
            text = asked["text"]
            for length in sorted(self._lengths, reverse=True):
                if length < len(text) and (found := self._answered.get(_text(text[:length]))):
                    return found, {"text": text[length:]}
        if "messages" in asked:
            for length in range(len(asked["messages"]) - 1, 0, -1):
                if (found := self._answered.get(question.prefixes[length])) is not None:
                    return found, {"messages": asked["messages"][length:]}
        return None

    def again(self, question: Question) -> Turn | None:
        """A turn that was asked just so and whose answer may not have arrived; handed out once."""
        owed = self._owed.get(question.digest)
        return owed.pop(0) if owed else None

    def owe(self, question: Question, turn: Turn) -> None:
        """Keep a turn for a program that may ask for it again."""
        self._owed.setdefault(question.digest, []).append(turn)

    def answer(self, question: Question, message: Message, turn: Turn) -> None:
        """Know the answer, so that it can be continued."""
        if "messages" in question.asked:
            self._answered[_hash(question.prefixes[-1], identity(message))] = turn
        elif "text" in question.asked:
            text = question.asked["text"] + message["content"]
            self._answered[_text(text)] = turn
            self._lengths.add(len(text))


def _ending(ids: "array[int]", end: int) -> "array[int]":
    """The buffer if nobody has gone on in it from `end`, else a copy up to there."""
    return ids if len(ids) == end else ids[:end]


def _prefixes(asked: Json) -> Iterator[Digest]:
    so_far = _hash(b"chat", asked["tools"])
    yield so_far
    for message in asked["messages"]:
        so_far = _hash(so_far, identity(message))
        yield so_far


def _text(text: str) -> Digest:
    return _hash(b"text", text)


def _hash(before: bytes, value: object) -> Digest:
    return sha256(before + json.dumps(value, sort_keys=True).encode()).digest()
