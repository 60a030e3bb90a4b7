"""Conversations as a program held them, told again from what is recorded.

What a program got to see is a function of the ids that were sampled, so it is not stored: of each
call the ledger keeps what its request added, and which call it went on from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from activities.chat import Chat
from activities.histories import Turn
from activities.openai_messages import Json, outgoing
from domain.tools import Message
from storage.sessions import Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One recorded call."""

    turn: Turn
    asked: Json
    """The whole request."""
    message: Message
    """The answer, as far as it is recorded."""
    continued: bool
    """A later call went on from the answer, so it had arrived."""


def retell(past: Past, chat: Chat) -> Iterator[Told]:
    """All calls of an attempt, oldest first."""
    told: dict[int, Told] = {}
    pairs = sorted(zip(past.calls, past.segments, strict=True), key=lambda pair: pair[0].call)
    continued = {recorded.after for recorded in past.calls}
    for call, group in groupby(pairs, key=lambda pair: pair[0].call):
        (first, opening), *_ = parts = list(group)
        asked = dict(first.asked or {})
        stop = asked.pop("stop")
        prompt = chat.asked(opening)
        if first.after is None:
            turn = Turn.first(prompt, asked)
        else:
            before = told[first.after]
            turn = before.turn.followed_by(prompt, asked)
            asked = _joined(before, asked)
        turn.call, turn.cached = call, opening.cached_prompt_tokens
        turn.images = [image.sha256 for image in opening.images]
        for _, segment in parts:
            turn.look(segment)
            turn.extend(segment.sampled_ids, segment.logprobs)
            turn.finish = "stop" if segment.finish_reason == "stop" else None
        told[call] = Told(
            turn=turn,
            asked=asked,
            message=message_of(chat, turn, asked, stop),
            continued=call in continued,
        )
        yield told[call]


def last_conversation(past: Past, chat: Chat) -> list[Message]:
    """The messages of the newest call, its answer included."""
    calls = list(retell(past, chat))
    if not calls:
        return []
    newest = calls[-1]
    if "messages" in newest.asked:
        return [*newest.asked["messages"], newest.message]
    prompt = newest.asked.get("text") or chat.text(newest.turn.ids[: newest.turn.prompt])
    return [{"role": "user", "content": prompt}, newest.message]


def message_of(chat: Chat, turn: Turn, asked: Json, stop: Sequence[str]) -> Message:
    """What the program gets to see of a turn; the same every time."""
    text = _until(chat.text(turn.sampled), stop)
    if "messages" not in asked:
        return {"role": "assistant", "content": text}
    message = chat.reply(turn.sampled, tools=bool(asked["tools"]))
    if isinstance(message.get("content"), str):
        message["content"] = _until(message["content"], stop)
    return outgoing(message, f"{turn.call}", text)


def _joined(before: Told, added: Json) -> Json:
    """A whole request, from the one before it, our answer, and what was added."""
    if "text" in added:
        return {"text": before.asked["text"] + before.message["content"] + added["text"]}
    return before.asked | {
        "messages": [*before.asked["messages"], before.message, *added["messages"]]
    }


def _until(text: str, stop: Sequence[str]) -> str:
    ends = [at for at in (text.find(end) for end in stop) if at >= 0]
    return text[: min(ends)] if ends else text
