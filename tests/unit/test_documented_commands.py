"""Every command of README.md and docs/ is one that exists, or stands here with the reason why not tried."""

import re
import tomllib
from typing import Any

import pytest
import typer.main

from domain.config import RunConfig
from domain.services import VARIABLES
from rollbook.cli import app
from tests.documented import ROOT, Typed, commands

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
KNOWN = {*VARIABLES.values(), "ROLLBOOK_VLLM_PYTHON", "OTEL_EXPORTER_OTLP_ENDPOINT"}
NOT_TRIED = {
    "docker": "no container engine in the tests; tests/unit/test_compose.py reads the file instead",
    "tcld": "Temporal Cloud's own command; the attributes it names are compared below",
    "psql": "PostgreSQL's own client; the address in it is made and used by test_looking.py",
    ".": "the shell's own",
    "cp": "the shell's own",
}
PLACEHOLDERS = {"N": "1", "GROUP": "1", "VERSION": "1", "[SAMPLE]": "0", "SAMPLE": "0"}


def parse(typed: Typed) -> None:
    """Let the command line take the words, as it would before it does anything."""
    words = [PLACEHOLDERS.get(word, word) for word in typed.words[1:]]
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "get_command"):
        assert words, f"{typed.page}: `{typed.line}` names no command"
        context = command.context_class(command, parent=context)
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"{typed.page}: there is no {name!r} (`{typed.line}`)"
    if any(word.startswith("--help") for word in words):
        return
    given = [word for word in words if not word.isupper() or word in ("RUN", "TASK")]
    if not given and any(p.required for p in command.params):
        return  # named in prose, without its arguments
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("typed", commands(), ids=lambda t: f"{t.page}: {t.line}")
def test_each_documented_command_exists(typed: Typed) -> None:
    first, *rest = typed.words
    if first == "rollbook" or first.endswith("/rollbook"):
        parse(typed)
        for word in rest:
            if word.endswith(".toml") and word.startswith("examples/"):
                RunConfig.load(ROOT / word)
    elif first == "make":
        assert rest
        assert rest[0] in TARGETS
    elif first == "pip":
        for extras in re.findall(r"\[([\w,]+)\]", typed.line):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    elif first == "python":
        assert rest[0] == "-m"
        assert (ROOT / (rest[1].replace(".", "/") + ".py")).exists()
    elif first == "export":
        assert rest[0].partition("=")[0] in KNOWN
    elif "=" in first:
        assert typed.words[1:] == () or first.partition("=")[0].isupper()
    else:
        assert first in NOT_TRIED, f"{typed.page}: `{typed.line}`: nobody tries it; say why here"


def test_the_pages_have_commands() -> None:
    pages = {typed.page for typed in commands()}
    assert pages >= {"README.md", "first-run.md", "resume.md", "cluster.md", "tuning.md"}
    assert len(commands()) > 60


def test_the_search_attributes_for_temporal_cloud_are_all_of_them() -> None:
    from activities.namespace import SEARCH_ATTRIBUTES

    (tcld,) = [typed for typed in commands() if typed.words[0] == "tcld"]
    named = {word.partition("=")[0] for word in tcld.words if word.startswith("Rollbook")}
    assert named == {key.name for key in SEARCH_ATTRIBUTES}


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
