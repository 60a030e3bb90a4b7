"""What a model folder says about text: the tokenizer, its special tokens, the chat template.

Templates are compiled as Hugging Face does it: sandboxed jinja2 with its few extras.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from domain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What a model folder says about text."""

    tokenizer: Tokenizer
    template: Template | None
    special: Mapping[str, str]
    stop_ids: frozenset[int]
    image_id: int | None
    """The token that stands for an image; None: the model reads text only."""

    @classmethod
    def read(cls, folder: Path) -> "TextFiles":
        """Read a model folder.

        Raises:
            ConfigError: a file is missing or unreadable.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing finer
            raise ConfigError(f"cannot read {path}: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _json(folder / "tokenizer_config.json")
        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token") and isinstance(value, dict | str)
        }
        ends = [
            _json(folder / name).get("eos_token_id")
            for name in ("generation_config.json", "config.json")
        ]
        stops = {i for end in ends for i in (end if isinstance(end, list) else [end])}
        stops.add(tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None)
        source = _template_source(folder, settings)
        return cls(
            tokenizer=tokenizer,
            template=compile_template(source) if source is not None else None,
            special=special,
            stop_ids=frozenset(stop for stop in stops if isinstance(stop, int)),
            image_id=_image_id(_json(folder / "config.json")),
        )


def _image_id(model: Mapping[str, Any]) -> int | None:
    found = model.get("image_token_id", model.get("image_token_index"))
    return found if isinstance(found, int) else None


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named templates
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return value


class _Generation(Extension):
    """`{% generation %}`: marks assistant text for trainers on text; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    """The template, with the globals and filters that chat templates rely on.

    Raises:
        ConfigError: it is no valid jinja2.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the chat template is not valid: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML, and models were trained on the plain form.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
