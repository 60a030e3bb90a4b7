"""Chat rendering by the `renderers` package, for the model families it knows (optional).

Its renderers are written by hand per family and prove themselves that a continuation keeps every
id; where one declines, the conversation is refused rather than rendered again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from activities.chat import Chat, Schemas, content
from domain.errors import ConfigError, SourceBroken
from domain.text import clean, clean_json
from domain.tools import MALFORMED, Message


class RendererChat(Chat):
    """A renderer of the package, chosen by name."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        special: Mapping[str, str],
        name: str,
    ) -> None:
        self._renderer = _create(name, tokenizer, special)
        super().__init__(tokenizer, stop_ids | frozenset(self._renderer.get_stop_token_ids()))

    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """The messages as the renderer writes them, with the assistant's opening."""
        flat = [{**message, "content": content(message)} for message in messages]
        functions = [schema["function"] for schema in tools] or None
        try:
            ids = self._renderer.render_ids(flat, tools=functions, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError) as error:
            raise SourceBroken(f"the renderer refuses the messages: {error}") from error
        return list(ids)

    def continuation(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message]
    ) -> list[int]:
        """The renderer's own bridge to the next turn."""
        flat = [{**message, "content": content(message)} for message in new]
        before = [*prompt, *sampled]
        bridge = self._renderer.bridge_to_next_turn(list(prompt), list(sampled), flat)
        ids = list(bridge.token_ids) if bridge is not None else []
        if ids[: len(before)] != before:
            roles = [message.get("role") for message in new]
            raise SourceBroken(
                f"the renderer cannot continue the conversation with the roles {roles} exactly; "
                'use another renderer, or model.renderer = "template"'
            )
        return ids

    def require_turns(self, *, tools: bool) -> None:
        """Each continuation is checked as it is made."""

    def reply(self, sampled: Sequence[int], *, tools: bool = False) -> Message:
        """The message as the renderer parses it; reasoning stays apart from the content."""
        parsed = self._renderer.parse_response(list(sampled))
        message: Message = {"role": "assistant", "content": clean(parsed.content)}
        if parsed.reasoning_content:
            message["reasoning_content"] = clean(parsed.reasoning_content)
        if tools and parsed.tool_calls:
            message["tool_calls"] = [_call(c, i) for i, c in enumerate(parsed.tool_calls)]
        return message


def _call(call: Any, number: int) -> dict[str, Any]:
    good = call.status == "ok" and call.name and isinstance(call.arguments, dict)
    arguments = json.dumps(clean_json(call.arguments), ensure_ascii=False) if good else call.raw
    function = {"name": call.name if good else MALFORMED, "arguments": clean(arguments)}
    return {"id": call.id or f"call_{number}", "type": "function", "function": function}


def _create(name: str, tokenizer: Tokenizer, special: Mapping[str, str]) -> Any:
    try:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name
    except ImportError as error:
        raise ConfigError(
            f"model.renderer = {name!r} needs the renderers package; pip install renderers, or use "
            f'"template" for the model\'s own chat template ({error})'
        ) from error
    try:
        # Sampled ids are kept as they are, so reasoning of earlier turns must be kept as well.
        config_class = type(config_from_name(name))
        keeps = "thinking_retention" in config_class.model_fields
        config = config_class(thinking_retention="all") if keeps else config_class()
        return create_renderer(_Tokenizer(tokenizer, special), config)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"model.renderer = {name!r}: {error}") from error


class _Tokenizer:
    """The few methods that the package asks of a tokenizer."""

    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self.unk_token_id = self._special("unk_token", special)
        self.eos_token_id = self._special("eos_token", special)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(self._tokenizer.encode(clean(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _special(self, key: str, special: Mapping[str, str]) -> int | None:
        name = special.get(key)
        found: int | None = self._tokenizer.token_to_id(name) if name else None
        return found
