"""One gateway session: the calls of one attempt's program, sampled and recorded.

A call is a turn of one or more segments within the rollout's budget. Everything a session knows can
be read from its record, so it may be dropped at any moment and opened again: turns that were
committed but perhaps never arrived are given to a program that asks for them again, unfinished ones
go on where they end.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from activities.chat import Chat
from activities.histories import Histories, Question, Turn
from activities.inference import Generated
from activities.openai_answers import Answered
from activities.openai_errors import ApiError
from activities.openai_messages import Json, for_template
from activities.openai_requests import Ask
from activities.session import Beside
from activities.transcripts import message_of, retell
from domain import images
from domain.capabilities import IMAGES
from domain.config import RunConfig
from domain.errors import BudgetExhausted, ConfigError, SourceBroken
from domain.images import Image
from domain.rollouts import Segment
from domain.sampling import Limits, Spent, next_request
from domain.text import clean
from domain.tools import Message
from storage.sessions import Past, Recorded, Session


class Unusable(Exception):
    """The model cannot serve this program, or an engine's answer cannot be used: an infra_error."""


class Record(Protocol):
    """Where the calls of one session are sampled and kept."""

    @property
    def deadline_reached(self) -> bool:
        """The group closed its doors: nothing more is sampled."""

    async def keep(self, image: Image) -> None:
        """See that an image lies in the object store."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        images: Sequence[str],
        beside: Beside,
    ) -> Segment:
        """One sampling request, kept before it returns.

        Raises:
            Stopped, Fenced, EngineError, LedgerError, CancelledError: as `SessionRecorder.sample`.
        """

    async def refuse(self, cause: str | None) -> None:
        """Note which budget refused the last request; None: a later one is granted."""

    async def fail(self, detail: str) -> None:
        """Make the rollout an infra_error, whatever its program makes of it."""


class LiveSession:
    """One open session. Its calls may run side by side."""

    def __init__(
        self,
        session: Session,
        config: RunConfig,
        chat: Chat,
        record: Record,
        past: Past,
        *,
        delivered: Collection[int] = (),
    ) -> None:
        """Take up what is recorded.

        Args:
            session: what its key opened.
            config: of the run,
            chat: and its format.
            record: where its calls are kept.
            past: what that holds.
            delivered: calls whose answers are known to have arrived.
        """
        self.session = session
        self.doubtful = False
        """Something ended midway: the ledger knows better, and the session must be read again."""
        self._chat = chat
        self._config = config
        self.limits = replace(Limits.of(config), reserve=0)
        self._record = record
        self._refused = session.refused
        self._histories = Histories()
        self._turns = len({recorded.call for recorded in past.calls})
        self._generated = sum(len(segment.sampled_ids) for segment in past.segments)
        self._promised = 0
        """Tokens that requests in progress may still sample."""
        self._settled = asyncio.Condition()
        for told in retell(past, self._chat):
            question = Question(told.asked)
            arrived = told.continued or told.turn.call in delivered
            if arrived:
                told.turn.finish = told.turn.finish or "length"
            else:
                self._histories.owe(question, told.turn)
            if told.turn.finish is not None:
                self._histories.answer(question, told.message, told.turn)

    async def answer(self, ask: Ask) -> Answered:
        """Sample one turn, or give one again that was recorded for a request like this.

        Raises:
            ApiError: the request cannot be served.
            BudgetExhausted: names the budget.
            Unusable: the attempt must end as an infra_error.
            Stopped, Fenced, CancelledError, OperationalError: as the recorder raised them.
        """
        question = Question(ask.asked)
        turn = self._histories.again(question)
        if turn is None:
            turn = self._begin(question)
            for image in ask.images:
                await self._record.keep(image)
        if turn.finish is None:
            await self._sample(turn, ask)
        message = message_of(self._chat, turn, ask.asked, ask.stop)
        self._histories.answer(question, message, turn)
        return self._answered(turn, ask, message)

    async def note_refusal(self, cause: str | None) -> None:
        """Tell the attempt which budget refused its program's last request, or that none did."""
        if cause != self._refused:
            await self._record.refuse(cause)
            self._refused = cause

    async def fail(self, detail: str) -> None:
        """Make the rollout an infra_error; what follows must be read anew."""
        await self._record.fail(detail)
        self.doubtful = True

    # ------------------------------------------------------------ prompts

    def _begin(self, question: Question) -> Turn:
        asked = question.asked
        shown = images.digests(asked.get("messages", ()))
        self._require_sight(shown)
        known = self._histories.continued(question)
        try:
            if known is None:
                turn = Turn.first(self._prompt(asked), asked)
            else:
                before, added = known
                turn = before.followed_by(self._continuation(before, added), added)
        except SourceBroken as error:
            raise ApiError(400, str(error)) from error
        except ConfigError as error:
            raise Unusable(str(error)) from error
        turn.images = shown
        return turn

    def _require_sight(self, shown: Sequence[str]) -> None:
        most = self._config.budget.max_images
        if most is not None and len(shown) > most:
            raise BudgetExhausted("images")
        if shown and (most is None or self._chat.image_id is None):
            lacking = (
                "the run does not ask its engines for it; set budget.max_images"
                if most is None
                else "its model reads text only (config.json names no image_token_id)"
            )
            raise ApiError(
                400,
                f"messages hold {len(shown)} images, which need {IMAGES!r}: {lacking}",
                code="unsupported_parameter",
                param="messages",
            )

    def _prompt(self, asked: Json) -> list[int]:
        if "ids" in asked:
            ids: list[int] = asked["ids"]
            size = self._chat.tokenizer.get_vocab_size()
            if max(ids) >= size:
                raise ApiError(400, f"the model has the token ids 0 to {size - 1}", param="prompt")
            return ids
        if "text" in asked:
            return self._chat.encode(asked["text"])
        return self._chat.prompt([for_template(m) for m in asked["messages"]], asked["tools"])

    def _continuation(self, before: Turn, added: Json) -> list[int]:
        context = before.context.tolist()
        if "text" in added:
            return [*context, *self._chat.encode(added["text"])]
        messages = [for_template(message) for message in added["messages"]]
        self._chat.require_turns(tools=any(m["role"] == "tool" for m in messages))
        return self._chat.continuation(context[: before.prompt], context[before.prompt :], messages)

    # ------------------------------------------------------------ sampling

    async def _sample(self, turn: Turn, ask: Ask) -> None:
        if turn.call is None:
            if self._turns >= self._config.budget.max_turns:
                raise BudgetExhausted("turns")
            self._turns += 1
        try:
            while turn.finish is None:
                await self._segment(turn, ask)
        except BudgetExhausted:
            if turn.call is None:
                self._turns -= 1
                raise
            turn.finish = "length"

    async def _segment(self, turn: Turn, ask: Ask) -> None:
        wrong = images.mismatch(turn.context.tolist(), turn.images, self._chat.image_id)
        if wrong is not None:
            raise Unusable(wrong)
        wanted = await self._grant(turn, ask)
        try:
            await self.note_refusal(None)
            segment = await self._record.sample(
                turn.context,
                max_tokens=wanted,
                images=turn.images,
                beside=self._beside(turn, ask),
            )
            self._generated += len(segment.sampled_ids)
        finally:
            async with self._settled:
                self._promised -= wanted
                self._settled.notify_all()
        if segment.finish_reason != "stop" and not len(segment.sampled_ids):
            raise Unusable(
                f"the engine ended a request of {wanted} tokens with {segment.finish_reason!r} "
                "and no tokens"
            )
        turn.look(segment)
        turn.extend(segment.sampled_ids, segment.logprobs)
        turn.cached = turn.cached or segment.cached_prompt_tokens
        if segment.finish_reason == "stop":
            turn.finish = "stop"

    async def _grant(self, turn: Turn, ask: Ask) -> int:
        """How many tokens the next request may sample; calls side by side share what is left."""
        spent = Spent(
            generated=self._generated, context=turn.end + turn.grown, turn=turn.end - turn.prompt
        )
        async with self._settled:
            while True:
                if self._record.deadline_reached:
                    raise BudgetExhausted("group_deadline")
                promised = replace(spent, generated=self._generated + self._promised)
                wanted = next_request(self.limits, promised, turn_cap=ask.max_tokens)
                if isinstance(wanted, int):
                    # One token tells what the images are; the turn goes on with what that leaves.
                    wanted = 1 if turn.unmeasured else wanted
                    self._promised += wanted
                    return wanted
                if wanted != "tokens" or not self._promised:
                    raise BudgetExhausted(wanted)
                await self._settled.wait()

    def _beside(self, turn: Turn, ask: Ask) -> Beside:
        def recorded(seq: int) -> Recorded:
            first = turn.call is None or turn.call == seq
            turn.call = seq if turn.call is None else turn.call
            asked = turn.added | {"stop": list(ask.stop)} if first else None
            return Recorded(seq=seq, call=turn.call, after=turn.after, asked=asked)

        before = turn.sampled
        return Beside(trim=partial(self._trim, before, ask.stop), recorded=recorded)

    def _trim(self, before: list[int], stop: Sequence[str], generated: Generated) -> Generated:
        """Cut after the token that completes a stop text, where an engine would have stopped."""
        ids = generated.sampled_ids

        def stopped(length: int) -> bool:
            text = self._chat.text([*before, *ids[:length]])
            return any(end in text for end in stop)

        if not stop or not stopped(len(ids)):
            return generated
        keep = bisect_left(range(len(ids)), True, key=lambda n: stopped(n + 1)) + 1
        spans, left = [], keep
        for version, tokens in generated.spans:
            spans.append((version, min(tokens, left)))
            left -= spans[-1][1]
        return replace(
            generated,
            sampled_ids=ids[:keep],
            logprobs=generated.logprobs[:keep],
            finish_reason="stop",
            spans=tuple(span for span in spans if span[1]),
            support=None if generated.support is None else generated.support[:keep],
        )

    # ------------------------------------------------------------ answers

    def _answered(self, turn: Turn, ask: Ask, message: Message) -> Answered:
        i, finish = self.session.attempt, turn.finish or "stop"
        sampled, decode = turn.sampled, self._chat.tokenizer.decode
        return Answered(
            call=turn.call or 0,
            name=f"{i.run}.g{i.group}.s{i.sample}.a{i.attempt}.{turn.call}",
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else finish,
            prompt_ids=[int(i) for i in turn.seen]
            if turn.images
            else turn.ids[: turn.prompt].tolist(),
            sampled_ids=sampled,
            logprobs=turn.logprobs.tolist(),
            tokens=[clean(decode([t], skip_special_tokens=False)) for t in sampled]
            if ask.logprobs
            else (),
            cached=turn.cached,
        )
