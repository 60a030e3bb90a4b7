"""Tool calls in text, in the Hermes form: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

A call that cannot be parsed is kept as a call of the unnamed tool, whose answer tells the model
what was wrong. It is never dropped: the model would wait for an answer that never comes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from domain.text import clean_json
from domain.tools import MALFORMED, Message

# An unclosed call runs to the end of the text: the model stopped in the middle of it.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse(text: str) -> Message:
    """An assistant message from its text; calls are numbered `call_0`, `call_1`, …"""
    calls = [_call(match[1].strip(), number) for number, match in enumerate(_CALL.finditer(text))]
    message: Message = {"role": "assistant", "content": _CALL.sub("", text).strip()}
    if calls:
        message["tool_calls"] = calls
    else:
        message["content"] = text
    return message


def preamble(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says about tools, for templates that do not say it themselves."""
    schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in tools)
    return (
        "You may call functions. Their signatures are within <tools></tools> tags:\n"
        f"<tools>\n{schemas}\n</tools>\n"
        "For each call, answer with a JSON object within <tool_call></tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def _call(text: str, number: int) -> dict[str, Any]:
    try:
        # Escapes in the JSON may spell NUL and lone surrogates, which Postgres cannot store.
        value = clean_json(json.loads(text))
    except (ValueError, RecursionError):
        value = None
    name, arguments = MALFORMED, text
    if isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"]:
        given = value.get("arguments", value.get("parameters", {}))
        if isinstance(given, dict):
            name, arguments = value["name"], json.dumps(given, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}
