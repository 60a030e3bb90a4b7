"""A recorder in memory whose model says what it is told to, and a model that can say it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from activities.chat import Chat
from domain.config import RunConfig, TinyModel
from domain.images import Image
from domain.rollouts import Segment
from trainer.folders import materialise_tiny

ALPHABET = "".join(chr(c) for c in range(32, 127)) + "\n"
TEMPLATE = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def printable(folder: Path, *, more: str = "") -> Chat:
    """A model with one token per printable character (and `more`), and a chat template."""
    materialise_tiny(TinyModel(alphabet=ALPHABET + more), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Chat.open(folder)


def config(**budget: Any) -> RunConfig:
    """A run with these budgets."""
    return RunConfig.parse(
        {
            "name": "r",
            "steps": 1,
            "tasks": {"source": "s:s", "dataset": "d:d"},
            "model": {"tiny": {"alphabet": ALPHABET}},
            "budget": budget,
            "trainer": {"width": 100_000},
        }
    )


class Scripted:
    """Implements `AttemptRecorder`; the model says the given replies, each ended by EOS."""

    def __init__(self, chat: Chat, *replies: str, ended: bool = True) -> None:
        self.chat_of = chat
        (self.eos,) = chat.stop_ids
        self.left = [[*chat.encode(reply), *([self.eos] if ended else [])] for reply in replies]
        self.segments: list[Segment] = []
        self.recorded: Sequence[Segment] = ()
        self.states: list[Any] = []
        self.deadline_reached = False
        self.deadline_after = 10**9
        self.fail_at: tuple[int, BaseException] | None = None
        self.phases: list[str] = []
        self.kept: list[Image] = []
        self.version = 7
        self.base_url = ""
        self.api_key = ""

    async def keep(self, image: Image) -> None:
        self.kept.append(image)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> Segment:
        if self.fail_at is not None and len(self.segments) == self.fail_at[0]:
            raise self.fail_at[1]
        assert max_tokens is not None
        ids, self.left[0] = self.left[0][:max_tokens], self.left[0][max_tokens:]
        finish = "stop" if ids and ids[-1] == self.eos else "length"
        if not self.left[0]:
            self.left.pop(0)
        segment = Segment(tuple(prompt_ids), tuple(ids), tuple(0.0 for _ in ids), finish, 7)
        self.segments.append(segment)
        self.deadline_reached = len(self.segments) >= self.deadline_after
        return segment

    def progress(self, phase: str, **facts: Any) -> None:
        self.phases.append(phase)

    async def save(self, state: Any) -> None:
        self.states.append(json.loads(json.dumps(state)))

    async def saved(self) -> Any:
        return self.states[-1] if self.states else None

    def again(self, *, segments: int, states: int) -> "Scripted":
        """A second execution, after the first one died with so much committed."""
        other = Scripted(self.chat_of)
        other.left = list(self.left)
        other.recorded = list(self.segments[:segments])
        other.states = self.states[:states]
        return other
