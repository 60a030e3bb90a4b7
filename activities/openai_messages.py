"""Messages of the OpenAI API: read, compared, shown to a template, and given back."""

import json
from typing import Any

from activities.openai_errors import ApiError
from domain.images import Image
from domain.tools import MALFORMED, Message

Json = dict[str, Any]


def read_message(value: object, number: int, shown: list[Image]) -> Message:
    """A message as it is stored; each image becomes its handle, and is added to `shown`.

    Raises:
        ApiError: 400, with its place among the messages.
    """
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


def _parsed(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
