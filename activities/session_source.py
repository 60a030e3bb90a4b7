"""The recorder that a SessionSource sees: the attempt's own, within the rollout's budget."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from activities.album import kept
from activities.chat import Chat
from activities.turns import Conversation, Turns
from domain.rollouts import Segment
from domain.tools import Message


class BudgetedRecorder:
    """Implements `Recorder`. A used-up budget raises `BudgetExhausted`.

    Several conversations may run side by side. One that goes on from what was said in it keeps its
    ids exactly; one whose history was rewritten starts a new chain.
    """

    def __init__(self, turns: Turns, chat: Chat, max_images: int | None, root: Path) -> None:
        self._recorder = turns.recorder
        self._turns = turns
        self._chat = chat
        self._max_images = max_images
        self._root = root
        self._conversations: list[Conversation] = []

    @property
    def version(self) -> int:
        """The version the next request would use."""
        return self._recorder.version

    @property
    def base_url(self) -> str:
        """The gateway's OpenAI base URL."""
        return self._recorder.base_url

    @property
    def api_key(self) -> str:
        """The attempt's own key at the gateway."""
        return self._recorder.api_key

    def progress(self, phase: str, **facts: Any) -> None:
        """Shown in the Temporal UI."""
        self._recorder.progress(phase, **facts)

    async def sample(self, prompt_ids: Sequence[int], *, max_tokens: int | None = None) -> Segment:
        """One request of at most `max_tokens`, `segment_tokens` and what is left of the budget."""
        return await self._turns.once(prompt_ids, max_tokens)

    async def chat(
        self, messages: list[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Message:
        """One assistant turn."""
        messages = await kept(self._recorder, messages, self._root)
        conversation = self._take_up(messages, list(tools))
        try:
            return await self._turns.turn(conversation)
        finally:
            self._conversations.append(conversation)

    def _take_up(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> Conversation:
        known = [
            c
            for c in self._conversations
            if c.tools == tools
            and len(c.messages) < len(messages)
            and messages[: len(c.messages)] == c.messages
        ]
        if not known:
            conversation = Conversation(self._chat, tools, max_images=self._max_images)
            conversation.begin(messages)
            return conversation
        conversation = max(known, key=lambda c: len(c.messages))
        self._conversations.remove(conversation)
        conversation.extend(messages[len(conversation.messages) :])
        return conversation
