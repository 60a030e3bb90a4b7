"""Text that Postgres, JSON and tokenizers all accept.

Sampled text may end in half a character, tools may print NUL bytes, and JSON escapes may spell lone
surrogates. None of them may stop a run, and none may reach a text column. Token ids are never made
from text that was repaired here: ids are stored as they were sampled.
"""

from collections.abc import Mapping
from typing import Any

REPLACEMENT = "�"


def clean(text: str) -> str:
    """`text` with NUL and lone surrogates replaced by U+FFFD; surrogate pairs become characters."""
    if "\x00" in text:
        text = text.replace("\x00", REPLACEMENT)
    if any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def clean_json(value: Any) -> Any:
    """A JSON value with every string in it cleaned."""
    match value:
        case str():
            return clean(value)
        case Mapping():
            return {clean(key): clean_json(item) for key, item in value.items()}
        case list() | tuple():
            return [clean_json(item) for item in value]
    return value


def not_json(value: Any, path: str = "") -> str | None:
    """Why `value` cannot be stored as JSON, naming the place; None if it can."""
    here = path or "the value"
    match value:
        case None | bool() | int():
            return None
        case float():
            finite = float("-inf") < value < float("inf")
            return None if finite else f"{here} is {value}, which JSON does not have"
        case str():
            return None if clean(value) == value else f"{here} holds NUL or a lone surrogate"
        case Mapping():
            for key, item in value.items():
                if not isinstance(key, str):
                    return f"{here} has the key {key!r}, which is no string"
                if clean(key) != key:
                    return f"{here} has a key with NUL or a lone surrogate"
                if (reason := not_json(item, f"{path}.{key}" if path else key)) is not None:
                    return reason
            return None
        case list() | tuple():
            for index, item in enumerate(value):
                if (reason := not_json(item, f"{path}[{index}]")) is not None:
                    return reason
            return None
    return f"{here} is a {type(value).__name__}"
