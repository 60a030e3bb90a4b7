"""What programs ask of the OpenAI API: requests read, and refused in its own words.

Pure. What a policy in training cannot honour and must not ignore is refused by name (several
choices, guided decoding); what the run decides is taken from the run (temperature, top_p, seed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from activities.openai_errors import ApiError
from activities.openai_messages import Json, read_message
from domain.images import Image
from domain.text import clean_json


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
    asked = {
        "messages": [read_message(m, n, shown) for n, m in enumerate(messages)],
        "tools": tools,
    }
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


def _is_tool(value: object) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _unsupported(name: str, remedy: str) -> ApiError:
    return ApiError(
        400,
        f"{name} is not supported by the recording gateway; {remedy}",
        code="unsupported_parameter",
        param=name,
    )
