"""The OpenAI API as text: requests read and refused, answers written, streamed or whole.

Pure. What a policy in training cannot honour and must not ignore is refused by name (several
choices, guided decoding); what the run decides is taken from the run (temperature, top_p, seed).
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domain.images import Image
from domain.text import clean_json
from domain.tools import MALFORMED, Message

Json = dict[str, Any]


class ApiError(Exception):
    """An answer in the API's own form that is no success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        again: bool = False,
    ) -> None:
        """An error.

        Args:
            status: of HTTP.
            message: for people.
            code: for programs.
            param: the field of the request that it is about.
            again: whether clients should send the same request again.
        """
        super().__init__(message)
        self.status = status
        self.again = again
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients obey this one."""
        return {"x-should-retry": "true" if self.again else "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for one answer."""

    asked: Json
    """What determines the prompt, as JSON: `messages` and `tools`, `text`, or `ids`."""
    model: str
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """A stream ends with a chunk that counts tokens."""
    logprobs: bool
    token_ids: bool
    """Answer with the ids too, as vLLM does (`return_token_ids`)."""
    images: tuple[Image, ...] = ()
    """What the handles in its messages stand for."""


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


def read_chat(body: object) -> Ask:
    """A request to `/v1/chat/completions`.

    Raises:
        ApiError: 400, with the field.
    """
    table = _table(body)
    for name in ("functions", "function_call"):
        if table.get(name):
            raise _unsupported(name, "use tools")
    form = table.get("response_format")
    if form and not (isinstance(form, Mapping) and form.get("type") == "text"):
        raise _unsupported("response_format", "ask for the form in the messages")
    messages = table.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list that is not empty", param="messages")
    tools = table.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ApiError(400, 'tools must be a list of {"type": "function", ...}', param="tools")
    if table.get("tool_choice") == "none":
        tools = []
    shown: list[Image] = []
    asked = {"messages": [_message(m, n, shown) for n, m in enumerate(messages)], "tools": tools}
    limits = [table.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return _ask(table, asked, limits, logprobs=table.get("logprobs") is True, shown=shown)


def read_completion(body: object) -> Ask:
    """A request to `/v1/completions`, with text or with token ids.

    Raises:
        ApiError: 400, with the field.
    """
    table = _table(body)
    for name in ("suffix", "echo"):
        if table.get(name):
            raise _unsupported(name, "leave it out")
    prompt = table.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        asked: Json = {"text": prompt}
    elif isinstance(prompt, list) and prompt and all(_is_id(token) for token in prompt):
        asked = {"ids": prompt}
    else:
        raise ApiError(
            400, "prompt must be one text or one list of token ids, not empty", param="prompt"
        )
    wants = table.get("logprobs")
    return _ask(table, asked, [table.get("max_tokens")], logprobs=isinstance(wants, int))


def identity(message: Message) -> Json:
    """What makes two messages the same one, however a client spells them.

    Of an assistant's turn that is its text, without the white space around it, and the names and
    arguments of its calls. Reasoning that clients drop stays in the model's context.
    """
    content = message.get("content") or ""
    if message["role"] != "assistant":
        same = {"content": content, "id": message.get("tool_call_id"), "name": message.get("name")}
        return {"role": message["role"]} | same
    calls = [
        [call["function"]["name"], _parsed(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return {
        "role": "assistant",
        "content": content.strip() if isinstance(content, str) else content,
        "calls": calls,
    }


def for_template(message: Message) -> Message:
    """A message as chat templates expect it: arguments of calls as objects."""
    shown = dict(message)
    if shown["role"] == "developer":
        shown["role"] = "system"
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _parsed(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return shown


def outgoing(message: Message, name: str, text: str) -> Message:
    """A sampled message as the API gives it.

    Calls get ids that no other turn has. A malformed call has no form in the API, so a turn that
    holds one is given as the text that was sampled.
    """
    calls = message.get("tool_calls") or []
    if any(call["function"]["name"] == MALFORMED for call in calls):
        return {"role": "assistant", "content": text}
    if not calls:
        return message
    named = [{**call, "id": f"call_{name}_{n}"} for n, call in enumerate(calls)]
    return {**message, "content": message.get("content") or None, "tool_calls": named}


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


def _ask(
    table: Json,
    asked: Json,
    limits: Sequence[object],
    *,
    logprobs: bool,
    shown: Sequence[Image] = (),
) -> Ask:
    for name in ("n", "best_of"):
        if table.get(name) not in (None, 1):
            raise _unsupported(name, "send as many requests as you want answers")
    wanted = next((limit for limit in limits if limit is not None), None)
    if wanted is not None and (
        not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1
    ):
        raise ApiError(400, f"max_tokens is {wanted!r}; the least is 1", param="max_tokens")
    stop = table.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, "stop must be a text or a list of texts, none empty", param="stop")
    options = table.get("stream_options")
    return Ask(
        asked=asked,
        model=str(table.get("model") or ""),
        max_tokens=wanted,
        stop=tuple(stops),
        stream=table.get("stream") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
        logprobs=logprobs,
        token_ids=table.get("return_token_ids") is True,
        images=tuple(shown),
    )


def _table(body: object) -> Json:
    if not isinstance(body, dict):
        raise ApiError(400, "the request must be a JSON object")
    cleaned: Json = clean_json(body)
    return cleaned


def _message(value: object, number: int, shown: list[Image]) -> Message:
    """A message as it is stored; each image becomes its handle, and is added to `shown`."""
    where = f"messages[{number}]"
    roles = ("system", "developer", "user", "assistant", "tool")
    if not isinstance(value, dict) or value.get("role") not in roles:
        raise ApiError(400, f"{where} needs a role of {', '.join(roles)}", param=where)
    message: Message = {key: item for key, item in value.items() if item is not None}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        seen = [_image(part, where) for part in parts]
        shown += [image for image in seen if image is not None]
        parts = [
            part if image is None else image.handle for part, image in zip(parts, seen, strict=True)
        ]
        if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
            message["content"] = "".join(part["text"] for part in parts)
        else:
            message["content"] = parts
    elif not isinstance(content, str | None):
        raise ApiError(400, f"{where}.content must be text or a list of parts", param=where)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ApiError(400, f"{where}.tool_calls holds what is no call of a function", param=where)
    if not calls:
        message.pop("tool_calls", None)
    return message


def _image(part: Json, where: str) -> Image | None:
    if part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    try:
        return Image.from_url(str(url))
    except ValueError as error:
        raise ApiError(
            400, f"{where}: {error}; the gateway fetches nothing", param=where
        ) from error


def _is_call(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )


def _is_tool(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _unsupported(name: str, remedy: str) -> ApiError:
    return ApiError(
        400,
        f"{name} is not supported by the recording gateway; {remedy}",
        code="unsupported_parameter",
        param=name,
    )
