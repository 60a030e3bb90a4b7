"""Assistant turns within a rollout's budget, and conversations whose ids only ever grow.

A turn is sampled in segments of at most `segment_tokens`. What an earlier execution of the attempt
committed is replayed first: the same decisions are made on the recorded segments, and sampling goes
on where they end.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from activities.chat import Chat, Schemas
from domain import images
from domain.capabilities import IMAGES
from domain.environments import AttemptRecorder
from domain.errors import (
    BudgetExhausted,
    ConfigError,
    EngineError,
    RollbookError,
    SourceBroken,
)
from domain.images import PlacedImage
from domain.rollouts import Segment
from domain.sampling import Limits, Spent, next_request
from domain.tools import Message

ANSWER_NOW: Message = {
    "role": "user",
    "content": "Your budget is used up. Give your final answer now.",
}


LONG_TURN = 4_096
"""Tokens whose decoding would hold up the event loop, and so every heartbeat, for long."""


class Failed(Exception):
    """The rollout ends as an infra_error: not the policy's fault, never scored."""

    def __init__(self, detail: str, *, lost: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.lost = lost


class Conversation:
    """One chain: its messages, and the ids of exactly what the model has seen and said.

    An image is one id here. What an engine makes of it is known from its first answer on.
    """

    def __init__(self, chat: Chat, tools: Schemas = (), *, max_images: int | None = None) -> None:
        self.chat = chat
        self.tools = tools
        self.max_images = max_images
        self.messages: list[Message] = []
        self.prompt: list[int] = []
        self.sampled: list[int] = []
        """Ids of the turn in progress, or of the last one."""
        self.images: list[str] = []
        """Digests of the images in the prompt, in order."""
        self._places: tuple[PlacedImage, ...] = ()
        self._before: tuple[list[int], list[int]] | None = None
        self._new: list[Message] = []

    @property
    def ids(self) -> list[int]:
        """What the next request sends."""
        return [*self.prompt, *self.sampled]

    @property
    def context(self) -> int:
        """Tokens of what the next request sends, images as the engine expands them."""
        grown = sum(place.length - 1 for place in self._places)
        return len(self.prompt) + len(self.sampled) + grown

    @property
    def unmeasured(self) -> bool:
        """There are images of which no engine has said how many tokens they are."""
        return len(self._places) < len(self.images)

    def begin(self, messages: Sequence[Message]) -> None:
        """Start a chain.

        Raises:
            BudgetExhausted: too many images.
            SourceBroken: the messages cannot be rendered.
            Failed: a token that stands for an image has none.
        """
        self._look(messages)
        self.messages = list(messages)
        self._before, self._new, self._places = None, self.messages, ()
        try:
            self.prompt, self.sampled = self.chat.prompt(messages, self.tools), []
        except ConfigError as error:
            raise SourceBroken(str(error)) from error
        self._see()

    def extend(self, new: Sequence[Message]) -> None:
        """Append messages after the assistant's turn; what was sent and sampled stays as it is.

        Raises:
            BudgetExhausted: too many images.
            SourceBroken: the messages cannot be rendered, or the template cannot be continued.
            Failed: a token that stands for an image has none.
        """
        self._look([*self.messages, *new])
        try:
            self.chat.require_turns(tools=bool(self.tools))
        except ConfigError as error:
            raise SourceBroken(str(error)) from error
        self._before, self._new = (self.prompt, self.sampled), list(new)
        self.prompt, self.sampled = self.chat.continuation(self.prompt, self.sampled, new), []
        self.messages = [*self.messages, *new]
        self._see()

    def take(self, segment: Segment) -> None:
        """Append what was sampled on `ids`."""
        self.sampled.extend(int(i) for i in segment.sampled_ids)
        self._places = segment.images

    def ask(self, message: Message) -> None:
        """Append a message also where the assistant was about to speak, or is cut short."""
        if self.sampled:
            self.close_turn()
            self.extend([message])
            return
        *others, last = self._new
        if last["role"] == message["role"] and isinstance(last.get("content"), str):
            # Many templates refuse two messages of one role in a row.
            new = [*others, {**last, "content": f"{last['content']}\n\n{message['content']}"}]
        else:
            new = [*self._new, message]
        if self._before is None:
            self.begin(new)
        else:
            self.messages = self.messages[: len(self.messages) - len(self._new)]
            self.prompt, self.sampled = self._before
            self.extend(new)

    def resume(self, last: Segment, messages: Sequence[Message], new: int) -> None:
        """Take up a chain after its last segment; the last `new` messages follow that segment."""
        self.messages = list(messages[: len(messages) - new])
        self.prompt = self.chat.asked(last)
        self.sampled = [int(i) for i in last.sampled_ids]
        self._places = last.images
        self.extend(messages[len(messages) - new :])

    def close_turn(self) -> Message:
        """Read what was sampled as the assistant's message, and append it."""
        message = self.chat.reply(self.sampled, tools=bool(self.tools))
        self.messages = [*self.messages, message]
        return message

    def _look(self, messages: Sequence[Message]) -> None:
        if self.max_images is not None and images.count(messages) > self.max_images:
            raise BudgetExhausted("images")
        if self.max_images is None and images.digests(messages):
            raise SourceBroken(
                f"a message holds an image, for which an engine needs {IMAGES!r}; set "
                "budget.max_images, so that engines are asked for it before anything is sampled"
            )

    def _see(self) -> None:
        """Check that each image has its token, and no token lacks its image."""
        self.images = images.digests(self.messages)
        self.require_images()

    def require_images(self) -> None:
        """See that each token that stands for an image has its image, and the other way round.

        Raises:
            Failed: they do not belong together; an engine would take one for another.
        """
        wrong = images.mismatch(self.ids, self.images, self.chat.image_id)
        if wrong is not None:
            raise Failed(wrong)


class Turns:
    """Samples the turns of one rollout, over all its conversations, within its budgets."""

    def __init__(self, recorder: AttemptRecorder, limits: Limits, *, max_turns: int) -> None:
        self.recorder = recorder
        self.limits = limits
        self.max_turns = max_turns
        self.turns = 0
        self.generated = 0
        self.segments = 0
        self.answering = False
        """The model was told to give its final answer; what it says next is the last turn."""
        self._recorded = deque(recorder.recorded)

    def skip(self, segments: int) -> Segment | None:
        """Count recorded segments as done, without deciding on them again; returns the last."""
        last = None
        for _ in range(segments):
            if not self._recorded:
                raise Failed("the saved state is newer than the recorded segments", lost=True)
            last = self._recorded.popleft()
            self.generated += len(last.sampled_ids)
            self.segments += 1
        return last

    async def turn(self, conversation: Conversation, *, cap: int | None = None) -> Message:
        """One assistant turn, appended to the conversation also when it is cut short.

        Args:
            conversation: Ends where the assistant speaks.
            cap: A lower limit for this turn, in tokens.

        Raises:
            BudgetExhausted: names the budget, or the group's deadline.
            Failed: the engine failed, or recorded segments do not fit.
        """
        if self.answering or self.turns >= self.max_turns:
            raise BudgetExhausted("turns")
        self.turns += 1
        try:
            while True:
                wanted = self._next(conversation, cap)
                segment = await self._request(conversation.ids, wanted, conversation)
                conversation.take(segment)
                if segment.finish_reason == "stop":
                    return await _close(conversation)
        except BudgetExhausted:
            if conversation.sampled:
                await _close(conversation)
            raise

    async def once(self, prompt: Sequence[int], max_tokens: int | None) -> Segment:
        """One request on ids of the caller's own.

        Raises:
            BudgetExhausted: names the budget, or the group's deadline.
            Failed: the engine failed.
        """
        spent = Spent(generated=self.generated, context=len(prompt))
        wanted = next_request(self.limits, spent, answering=True)
        if isinstance(wanted, str):
            raise BudgetExhausted(wanted)
        return await self._request(list(prompt), min(wanted, max_tokens or wanted))

    def _next(self, conversation: Conversation, cap: int | None) -> int:
        while True:
            spent = Spent(
                generated=self.generated,
                context=conversation.context,
                turn=len(conversation.sampled),
            )
            wanted = next_request(
                self.limits,
                spent,
                answering=self.answering,
                turn_cap=None if self.answering else cap,
            )
            if not isinstance(wanted, str):
                # One token tells what the images are; the turn goes on with what that leaves.
                return 1 if conversation.unmeasured else wanted
            if self.answering or wanted == "turn_tokens" or not self.limits.reserve:
                raise BudgetExhausted(wanted)
            self.answering = True
            self.turns += bool(conversation.sampled)
            conversation.ask(ANSWER_NOW)

    async def _request(
        self, prompt: list[int], wanted: int, conversation: Conversation | None = None
    ) -> Segment:
        segment = self._replayed(prompt, conversation)
        if segment is None:
            if self.recorder.deadline_reached:
                raise BudgetExhausted("group_deadline")
            self.recorder.progress("sampling", turn=self.turns, tokens=self.generated)
            shown: Sequence[str] = ()
            if conversation is not None:
                conversation.require_images()
                shown = conversation.images
            segment = await self._sample(prompt, wanted, shown)
        self.segments += 1
        self.generated += len(segment.sampled_ids)
        # What an aborted request had sampled is kept, and the turn goes on from there.
        if segment.finish_reason != "stop" and not len(segment.sampled_ids):
            raise Failed(
                f"the engine ended a request of {wanted} tokens with {segment.finish_reason!r} "
                "and no tokens"
            )
        return segment

    def _replayed(self, prompt: list[int], conversation: Conversation | None) -> Segment | None:
        if not self._recorded:
            return None
        segment = self._recorded.popleft()
        shown, asked = [], list(segment.prompt_ids)
        if conversation is not None:
            shown, asked = conversation.images, conversation.chat.asked(segment)
        if asked != prompt or shown != [image.sha256 for image in segment.images]:
            raise Failed(
                f"recorded segment {self.segments} has another prompt than the one rendered now: "
                "the environment, the template or the configuration changed",
                lost=True,
            )
        return segment

    async def _sample(self, prompt: list[int], wanted: int, shown: Sequence[str]) -> Segment:
        try:
            return await self.recorder.sample(prompt, max_tokens=wanted, images=shown)
        except EngineError as error:
            raise Failed(f"sampling failed: {type(error).__name__}: {error}") from error
        except RollbookError:
            raise  # cancelled or fenced: not this rollout's to judge
        except Exception as error:
            raise Failed(f"sampling failed: {type(error).__name__}: {error}") from error


async def _close(conversation: Conversation) -> Message:
    if len(conversation.sampled) < LONG_TURN:
        return conversation.close_turn()
    return await asyncio.to_thread(conversation.close_turn)
