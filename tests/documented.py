"""The commands in README.md and docs/, line by line, as a reader would type them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(rollbook [^`\n]+|make [^`\n]+|python -m [^`\n]+|pip install [^`\n]+)`")
SHELL = {"", "sh", "bash", "console"}
FIRST = re.compile(r"^([A-Z_]+=|(rollbook|make|pip|python|export|psql|docker|tcld|cp|\.) )")


@dataclass(frozen=True)
class Typed:
    """One command of a page."""

    page: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def commands() -> list[Typed]:
    """All commands of fenced blocks and of `inline` code, each once a page."""
    return list(dict.fromkeys(found for page in PAGES for found in of_page(page)))


def of_page(page: Path) -> Iterator[Typed]:
    text = page.read_text("utf-8")
    for language, block in FENCE.findall(text):
        if language in SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                if FIRST.match(line):
                    yield from typed(page, line)
    for line in INLINE.findall(FENCE.sub("", text)):
        yield from typed(page, line)


def typed(page: Path, line: str) -> Iterator[Typed]:
    """A line's commands: comments are cut off, `a && b` is two, `$(…)` is one of its own."""
    for inner in re.findall(r"\$\(([^)]*)\)", line):
        yield from typed(page, inner)
    words = shlex.split(re.sub(r"\$\([^)]*\)", "SUBSTITUTED", line), comments=True)
    command: list[str] = []
    for word in [*words, "&&"]:
        if word != "&&":
            command.append(word)
        elif command:
            yield Typed(page.name, tuple(command))
            command = []
