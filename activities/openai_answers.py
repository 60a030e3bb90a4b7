"""Answers of the OpenAI API, whole or streamed, from what was recorded. Pure."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from activities.openai_messages import Json
from activities.openai_requests import Ask
from domain.tools import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One recorded answer."""

    call: int
    """Number of its first segment."""
    name: str
    """Unique for the call."""
    message: Message
    """For a plain completion its content is the text."""
    finish_reason: str
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[str]
    """Text of each sampled id by itself, where log-probabilities were asked for."""
    cached: int


def chat_answer(ask: Ask, answer: Answered) -> Json:
    """The body of a whole chat completion."""
    choice: Json = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": _chat_logprobs(answer) if ask.logprobs else None,
    }
    return _body(ask, answer, "chat.completion", [choice | _ids(ask, answer)])


def chat_chunks(ask: Ask, answer: Answered) -> Iterator[Json]:
    """The same as a stream."""
    delta: Json = {**answer.message, "content": answer.message.get("content") or ""}
    calls = delta.pop("tool_calls", [])
    role = delta.pop("role")
    first: Json = {"index": 0, "delta": {"role": role, "content": ""}, "finish_reason": None}
    yield _body(ask, answer, "chat.completion.chunk", [first])
    if delta["content"]:
        told = _chat_logprobs(answer) if ask.logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": None}
        yield _body(ask, answer, "chat.completion.chunk", [choice])
    for n, call in enumerate(calls):
        part = {"index": 0, "delta": {"tool_calls": [{"index": n, **call}]}, "finish_reason": None}
        yield _body(ask, answer, "chat.completion.chunk", [part])
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
    yield _body(ask, answer, "chat.completion.chunk", [last | _ids(ask, answer)])
    yield from _usage_chunk(ask, answer, "chat.completion.chunk")


def completion_answer(ask: Ask, answer: Answered) -> Json:
    """The body of a whole plain completion."""
    choice: Json = {
        "index": 0,
        "text": answer.message["content"],
        "finish_reason": answer.finish_reason,
        "logprobs": _plain_logprobs(answer) if ask.logprobs else None,
    }
    return _body(ask, answer, "text_completion", [choice | _ids(ask, answer)])


def completion_chunks(ask: Ask, answer: Answered) -> Iterator[Json]:
    """The same as a stream."""
    yield _body(ask, answer, "text_completion", completion_answer(ask, answer)["choices"])
    yield from _usage_chunk(ask, answer, "text_completion")


def stream(chunks: Iterable[Json]) -> bytes:
    """Chunks as server-sent events."""
    events = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks]
    return "".join([*events, "data: [DONE]\n\n"]).encode()


def _body(ask: Ask, answer: Answered, kind: str, choices: list[Json]) -> Json:
    body: Json = {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{answer.name}",
        "object": kind,
        "created": int(time.time()),
        "model": ask.model,
        "choices": choices,
    }
    if not ask.stream:
        body["usage"] = _usage(answer)
    if ask.token_ids and choices and choices[0]["finish_reason"]:
        body["prompt_token_ids"] = list(answer.prompt_ids)
    return body


def _usage_chunk(ask: Ask, answer: Answered, kind: str) -> Iterator[Json]:
    if ask.usage:
        yield _body(ask, answer, kind, []) | {"usage": _usage(answer)}


def _usage(answer: Answered) -> Json:
    prompt, sampled = len(answer.prompt_ids), len(answer.sampled_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _ids(ask: Ask, answer: Answered) -> Json:
    return {"token_ids": list(answer.sampled_ids)} if ask.token_ids else {}


def _chat_logprobs(answer: Answered) -> Json:
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _plain_logprobs(answer: Answered) -> Json:
    offsets, at = [], 0
    for text in answer.tokens:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": list(answer.tokens),
        "token_logprobs": list(answer.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
