"""Tools a model may call: a Python coroutine, its JSON schema, and how a call is answered.

A tool's own exception is an observation for the model. Only what is not the policy's fault
(`InfrastructureError`, `ConnectionError`, `TimeoutError`) and a broken contract leave a call as
exceptions.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from domain.errors import AgentError, ConfigError, InfrastructureError, SourceBroken
from domain.text import clean

Message = dict[str, Any]

MALFORMED = ""
"""Name of a tool call that could not be parsed; its arguments are the text the model wrote."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)


@dataclass(frozen=True)
class Tool:
    """A coroutine function that a model may call. Made by `tool`."""

    name: str
    description: str
    arguments: type[BaseModel]
    function: Callable[..., Awaitable[str]]

    async def __call__(self, **arguments: Any) -> str:
        return await self.function(**arguments)

    def __get__(self, instance: object, owner: type | None = None) -> "Tool":
        # A tool may be a method of its environment: looked up on an instance, it is bound.
        if instance is None:
            return self
        return replace(self, function=self.function.__get__(instance, owner))

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates expect it."""
        parameters = _strip_titles(self.arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def tool(function: Callable[..., Awaitable[str]]) -> Tool:
    """Make a tool of a coroutine function; the schema comes from type hints and docstring.

    Raises:
        ConfigError: not a coroutine function, a parameter without a type hint, or no docstring.
    """
    name = function.__name__
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"tool {name!r} must be an async function")
    description, notes = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"tool {name!r} needs a docstring: it is what the model reads")
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {parameter} must have a name of its own")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        note = notes.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=note))
    arguments = create_model(f"{name}_arguments", __base__=_Arguments, **fields)
    return Tool(name, description, arguments, function)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Tool messages that answer one assistant message, and how many of the calls went wrong."""

    messages: list[Message]
    malformed: int = 0
    errors: int = 0


async def answer_calls(message: Message, tools: Sequence[Tool]) -> Answered:
    """Run the tool calls of an assistant message one after another.

    Raises:
        InfrastructureError, ConnectionError, TimeoutError, AgentError: as the tool raised them.
        SourceBroken: a tool did not return a string.
    """
    answers: list[Message] = []
    malformed = errors = 0
    by_name = {tool.name: tool for tool in tools}
    for call in message.get("tool_calls") or ():
        name = str(call["function"]["name"])
        arguments = call["function"]["arguments"]
        output, fault = await _answer(name, arguments, by_name)
        malformed += name == MALFORMED
        errors += fault
        answers.append(
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": output}
        )
    return Answered(messages=answers, malformed=malformed, errors=errors)


async def _answer(name: str, arguments: Any, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    if name == MALFORMED:
        return (
            'error: malformed tool call; write {"name": NAME, "arguments": {...}} as valid JSON',
            True,
        )
    tool = tools.get(name)
    if tool is None:
        return f"error: there is no tool {name!r}; tools: {', '.join(sorted(tools))}", True
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        checked = tool.arguments.model_validate(values)
    except ValidationError as error:
        return f"error: wrong arguments for {name}: {_explain(error)}", True
    except ValueError as error:
        return f"error: the arguments of {name} are not valid JSON: {error}", True
    given = {field: getattr(checked, field) for field in checked.model_fields_set}
    try:
        output: object = await tool(**given)
    except (InfrastructureError, ConnectionError, TimeoutError, AgentError, SourceBroken):
        raise
    except Exception as error:  # noqa: BLE001 - user code: the model sees what went wrong
        return clean(f"error: {name} raised {type(error).__name__}: {error}"), True
    if not isinstance(output, str):
        raise SourceBroken(f"tool {name!r} returned a {type(output).__name__}; return a string")
    return clean(output), False


def _explain(error: ValidationError) -> str:
    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
        for problem in error.errors()
    ]
    return "; ".join(problems)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description and the notes on arguments of a Google-style docstring."""
    description, _, rest = text.partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    notes: dict[str, str] = {}
    name = None
    for line in section.splitlines():
        match = re.match(r"\s{1,4}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        if match:
            name = match[1]
            notes[name] = match[2].strip()
        elif name and line.strip():
            notes[name] += f" {line.strip()}"
    cut = re.split(r"\n(?:Returns|Raises|Yields|Example):", description, maxsplit=1)[0]
    return cut.strip(), notes


def _strip_titles(schema: Any) -> Any:
    # pydantic adds a title to every level; for a model they are only more tokens to read.
    match schema:
        case dict():
            return {
                key: _strip_titles(value)
                for key, value in schema.items()
                if not (key == "title" and isinstance(value, str))
            }
        case list():
            return [_strip_titles(item) for item in schema]
    return schema
