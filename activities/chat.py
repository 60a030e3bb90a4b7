"""Messages to token ids and back, with `tokenizers` and jinja2 alone (transformers brings torch).

Ids are never made from text that was sampled. A conversation grows at its end: the next prompt is
the previous prompt, the ids that were sampled, and the encoding of what the chat template writes
after an assistant's turn. That tail comes from rendering a probe conversation whose assistant turn
is a marker, so it does not depend on the history; a template for which this is not what it would
have written is refused for several turns.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from tokenizers import Encoding, Tokenizer

from activities import toolcalls
from activities.templates import TextFiles
from domain import images
from domain.errors import ConfigError, SourceBroken
from domain.rollouts import Segment
from domain.text import clean
from domain.tools import Message

_MARKER = "rollbook-assistant-turn"
_PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARKER}]

_LONGEST_TOKENS = 8
"""Characters that are read for each token of very long text that is kept."""

Schemas = Sequence[Mapping[str, Any]]


class Chat(ABC):
    """How one model's messages become ids. Immutable; shared by all rollouts of a worker."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        """Ids that end an assistant's turn: what a sampling request must stop at."""
        self.image_id: int | None = None
        """The token that stands for an image in a prompt; None: text only."""

    @staticmethod
    def open(folder: Path, *, renderer: str = "auto") -> "Chat":
        """The chat of a model folder.

        Args:
            folder: Holds tokenizer.json and, if there is one, the chat template.
            renderer: `[model] renderer`.

        Raises:
            ConfigError: a file is missing or unreadable, or the renderer is unknown.
        """
        files = TextFiles.read(folder)
        if renderer not in ("auto", "template"):
            from activities.renderer import RendererChat  # optional dependency

            return RendererChat(files.tokenizer, files.stop_ids, files.special, renderer)
        if files.template is None:
            if renderer == "template":
                raise ConfigError(
                    f'model.renderer = "template", but {folder} has no chat template; add '
                    'chat_template.jinja, or use "auto" for a model without one'
                )
            return PlainChat(files.tokenizer, files.stop_ids)
        return TemplateChat(
            files.tokenizer, files.stop_ids, files.template, files.special, image_id=files.image_id
        )

    @abstractmethod
    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """Ids of a fresh prompt, up to where the assistant begins.

        Raises:
            SourceBroken: the messages cannot be rendered or encoded.
        """

    @abstractmethod
    def continuation(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message]
    ) -> list[int]:
        """The next prompt: the last one and what was sampled on it, unchanged, then new messages.

        Raises:
            SourceBroken: the messages cannot be rendered or encoded.
        """

    @abstractmethod
    def require_turns(self, *, tools: bool) -> None:
        """Refuse a model whose conversations cannot be continued token-exactly.

        Raises:
            ConfigError: names what the template does.
        """

    def asked(self, segment: Segment) -> list[int]:
        """The prompt of a recorded segment as it was asked for: one id for each image."""
        ids = [int(i) for i in segment.prompt_ids]
        return ids if self.image_id is None else images.compact(ids, segment.images, self.image_id)

    def text(self, sampled: Sequence[int]) -> str:
        """What was sampled, without the id that ended it. Half characters become U+FFFD."""
        ids = list(sampled)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return clean(self.tokenizer.decode(ids, skip_special_tokens=False))

    def reply(self, sampled: Sequence[int], *, tools: bool = False) -> Message:
        """The assistant message that was sampled; tool calls are parsed if tools were offered."""
        text = self.text(sampled)
        return toolcalls.parse(text) if tools else {"role": "assistant", "content": text}

    def encode(self, text: str) -> list[int]:
        """Ids of a text, in which the names of special tokens mean those tokens.

        Raises:
            SourceBroken: the tokenizer has no ids for it.
        """
        return list(self._encoding(text).ids)

    def elide(self, text: str, keep: int) -> tuple[str, int]:
        """`text` cut in the middle to about `keep` tokens, and how many were left out.

        Of a very long text only both ends are encoded, since encoding holds up everything else in
        the process (2 MB take seconds); the tokens left out are then estimated from their share.
        """
        window = _LONGEST_TOKENS * keep
        if len(text) <= 2 * window:
            offsets = self._encoding(text).offsets
            if len(offsets) <= keep:
                return text, 0
            first = last = offsets
            base = 0
        else:
            base = len(text) - window
            first, last = self._encoding(text[:window]).offsets, self._encoding(text[base:]).offsets
        head, tail = keep - keep // 2, keep // 2
        begin = first[:head][-1][1] if first else 0
        end = base + last[-tail:][0][0] if tail and last else len(text)
        if base:
            left_out = round((end - begin) * (len(first) + len(last)) / (2 * window))
        else:
            left_out = len(first) - keep
        return f"{text[:begin]}\n[.. {left_out} tokens left out ..]\n{text[end:]}", left_out

    def _encoding(self, text: str) -> Encoding:
        try:
            return self.tokenizer.encode(clean(text), add_special_tokens=False)
        except Exception as error:  # tokenizers raises nothing finer
            raise SourceBroken(
                f"the model's tokenizer cannot encode {text!r:.200}: {error}"
            ) from error


class PlainChat(Chat):
    """A model without a chat template: a conversation is its contents, one after the other."""

    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """The contents, encoded as they are."""
        if tools:
            self.require_turns(tools=True)
        return self.encode("".join(content(message) for message in messages))

    def continuation(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message]
    ) -> list[int]:
        """The new contents, after what there was."""
        return [*prompt, *sampled, *self.encode("".join(content(message) for message in new))]

    def require_turns(self, *, tools: bool) -> None:
        """Concatenation continues exactly; what is missing is a way to tell of tools."""
        if tools:
            raise ConfigError(
                "the environment has tools, but the model has no chat template that could tell it "
                "of them; add chat_template.jinja to the model folder"
            )


class TemplateChat(Chat):
    """The model's own chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        template: Template,
        special: Mapping[str, str],
        *,
        image_id: int | None = None,
    ) -> None:
        super().__init__(tokenizer, stop_ids)
        self.image_id = image_id
        self._template = template
        self._special = special
        if self._closing is not None:
            self.stop_ids = stop_ids | {self._closing}

    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        """The messages as the template writes them, with the assistant's opening."""
        if tools and self._ignores_tools:
            messages, tools = _told_of(tools, messages), ()
        return self.encode(self._render(messages, tools))

    def continuation(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message]
    ) -> list[int]:
        """What was, and what the template writes after an assistant's turn."""
        tail = self.encode(self._after_marker([*_PROBE, *new]))
        # The id that closes the turn was sampled, unless a limit cut the turn short.
        if sampled and tail and tail[0] == sampled[-1] and tail[0] in self.stop_ids:
            tail = tail[1:]
        return [*prompt, *sampled, *tail]

    def require_turns(self, *, tools: bool) -> None:
        """Compare continued with wholly rendered conversations, with and without tools."""
        problem = self._problem_with_tools if tools else self._problem
        if problem is not None:
            raise ConfigError(
                f"the chat template cannot continue a conversation exactly: {problem}; use "
                "another template, or model.renderer with a name the renderers package knows"
            )

    @cached_property
    def _problem(self) -> str | None:
        return self._try([{"role": "user", "content": "next-question"}])

    @cached_property
    def _problem_with_tools(self) -> str | None:
        answer = {"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "next-answer"}
        return self._problem or self._try([answer])

    def _try(self, new: list[Message]) -> str | None:
        """Why a probe conversation does not continue exactly, or None."""
        system = {"role": "system", "content": "instruction"}
        try:
            for opening in ([], [system]):
                prompt = self._render([*opening, _PROBE[0]], ())
                whole = self._render([*opening, *_PROBE, *new], ())
                tail = self._after_marker([*_PROBE, *new])
                if not whole.startswith(prompt) or not whole.endswith(_MARKER + tail):
                    return "it writes earlier messages differently once others follow"
                if str(new[-1]["content"]) not in tail:
                    return f"it does not write {new[-1]['role']!r} messages"
                closing = self.encode(tail)[0]
                if closing not in self.stop_ids:
                    return "it does not close the assistant's turn with a special token"
                if self.encode(whole) != [
                    *self.encode(prompt),
                    *self.encode(whole[len(prompt) : len(whole) - len(tail)]),
                    *self.encode(tail),
                ]:
                    return "turns do not begin and end at token borders"
        except SourceBroken as error:
            return str(error)
        return None

    @cached_property
    def _closing(self) -> int | None:
        """The special token with which the template closes an assistant's turn."""
        try:
            tail = self.encode(self._after_marker([*_PROBE, _PROBE[0]]))
        except SourceBroken:
            return None
        special = self.tokenizer.get_added_tokens_decoder()
        return tail[0] if tail and tail[0] in special and special[tail[0]].special else None

    @cached_property
    def _ignores_tools(self) -> bool:
        function = {"name": "probe_tool", "description": "", "parameters": {"type": "object"}}
        schema = {"type": "function", "function": function}
        return "probe_tool" not in self._render([_PROBE[0]], [schema])

    def _after_marker(self, messages: Sequence[Message]) -> str:
        before, marker, after = self._render(messages, ()).rpartition(_MARKER)
        if not marker or _MARKER in before:
            raise SourceBroken("the chat template does not write an assistant's turn once")
        return after

    def _render(self, messages: Sequence[Message], tools: Schemas) -> str:
        flat = [{**message, "content": self._content(message)} for message in messages]
        try:
            return self._template.render(
                messages=flat,
                tools=list(tools) or None,
                add_generation_prompt=True,
                **self._special,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise SourceBroken(
                f"the chat template refuses messages with the roles {roles}: {error}"
            ) from error

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """The text; or, as templates of models that see expect it, a list of texts and images."""
        if self.image_id is None or not images.digests([message]):
            return content(message)
        return [
            {"type": "image"}
            if images.is_handle(part)
            else {"type": "text", "text": content({**message, "content": [part]})}
            for part in message["content"]
        ]


def content(message: Message) -> str:
    """The text of a message.

    Raises:
        SourceBroken: it holds something that is no text.
    """
    value = message.get("content")
    if value is None or isinstance(value, str):
        return clean(value or "")
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    ):
        return clean("".join(str(part["text"]) for part in value))
    raise SourceBroken(
        f"a {message.get('role')!r} message holds {value!r:.80}; this model takes text only"
    )


def _told_of(tools: Schemas, messages: Sequence[Message]) -> list[Message]:
    text = toolcalls.preamble(tools)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{content(messages[0])}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
