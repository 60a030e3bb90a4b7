"""Drive an `Env`: reset, turn after turn, verdict; and take it up where a dead worker left it."""

import asyncio
import logging
from copy import copy
from pathlib import Path
from typing import Any

from activities.album import kept
from activities.chat import Chat, content
from activities.turns import Conversation, Failed, Turns
from activities.verdicts import as_reward, guarded, verdict
from domain.config import RunConfig
from domain.environments import AttemptRecorder, Env, Outcome, RolloutView, TurnResult
from domain.errors import AgentError, BudgetExhausted, SourceBroken
from domain.rollouts import Status, Task
from domain.sampling import Limits
from domain.text import clean, clean_json, not_json
from domain.tools import Message

logger = logging.getLogger(__name__)

CLOSE_S = 30.0
"""Seconds that `close()` may take before it is abandoned and named."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


class EnvRollout:
    """One rollout of an environment. The environment's copy lives and ends with it."""

    def __init__(
        self, env: Env, task: Task, recorder: AttemptRecorder, config: RunConfig, chat: Chat
    ) -> None:
        self._env = copy(env)
        self._name = type(env).__name__
        self._recorder = recorder
        self._chat = chat
        self._root = Path(config.root)
        self._limit_s = config.groups.environment_timeout
        self._tool_output_tokens = config.budget.tool_output_tokens
        self._turns = Turns(recorder, Limits.of(config), max_turns=config.budget.max_turns)
        self._conversation = Conversation(
            chat,
            [tool.schema for tool in env.tools],
            max_images=config.budget.max_images,
        )
        self._view = RolloutView(task)
        self._fresh = True
        """The messages wait for a chain of their own."""
        self._cap: int | None = None

    async def run(self) -> Outcome:
        """Play to the end. The environment is closed however that comes.

        Raises:
            CancelledError: the attempt was cancelled.
            SourceBroken: the environment broke its contract.
        """
        try:
            return await self._play()
        except Failed as failure:
            return Outcome(
                Status.INFRA_ERROR,
                detail=failure.detail,
                turns=self._turns.turns,
                metrics=dict(self._view.metrics),
                lost=failure.lost,
            )
        finally:
            await self._close()

    async def _play(self) -> Outcome:
        status, cause, detail = Status.COMPLETED, None, ""
        try:
            await self._take_turns()
        except BudgetExhausted as limit:
            status, cause = Status.TRUNCATED, limit.cause
        except AgentError as error:
            status, detail = Status.AGENT_ERROR, clean(str(error))
        self._refresh()
        self._recorder.progress("verifier")
        task = self._view.task
        if cause is None:
            where = f"{self._name}.reward"
            value = await verdict(where, self._env.reward, self._view, task, limit_s=self._limit_s)
        else:
            where = f"{self._name}.on_truncated"
            value = await verdict(
                where, self._env.on_truncated, self._view, task, cause, limit_s=self._limit_s
            )
        unjudged = cause is not None and value is None
        return Outcome(
            status,
            reward=None if unjudged else as_reward(value, where),
            cause=cause,
            detail=detail,
            turns=self._turns.turns,
            metrics=dict(self._view.metrics),
        )

    async def _take_turns(self) -> None:
        await self._start()
        while True:
            await self._turns.turn(self._conversation, cap=self._cap)
            if self._turns.answering:
                return
            self._refresh()
            tools = ", ".join(_called(self._view.messages[-1]))
            self._recorder.progress("environment", turn=self._turns.turns, tools=tools)
            result = await guarded(
                f"{self._name}.on_turn", self._env.on_turn(self._view), limit_s=self._limit_s
            )
            if result is None:
                return
            new = await self._read(result)
            rewritten, self._view.rewritten = self._view.rewritten, None
            if rewritten is not None:
                self._view.count("chains_rewritten")
                new = [*await self._messages(rewritten, "rewrite"), *new]
            elif not new:
                raise SourceBroken(
                    f"{self._name}.on_turn returned no messages; return None to end the rollout"
                )
            await self._go_on(new, fresh=rewritten is not None)

    async def _start(self) -> None:
        recovery = self._env.recovery
        if recovery == "drop" and self._recorder.recorded:
            raise Failed(
                f'the worker died, and {self._name}.recovery = "drop" starts again', lost=True
            )
        saved = None if recovery == "drop" else await self._recorder.saved()
        self._recorder.progress("reset")
        if saved is None or recovery == "stateless":
            where = f"{self._name}.reset"
            first: object = await guarded(
                where, self._env.reset(self._view.task), limit_s=self._limit_s
            )
            if saved is None:
                await self._go_on(await self._messages(first, "reset"), fresh=True)
                return
        self._restore_history(saved)
        if recovery == "snapshot":
            where = f"{self._name}.restore"
            await guarded(
                where, self._env.restore(self._view, saved["environment"]), limit_s=self._limit_s
            )

    async def _go_on(self, new: list[Message], *, fresh: bool) -> None:
        """Put messages before the model, and keep this turn boundary."""
        new = [self._elided(message) for message in new]
        if self._turns.turns >= self._turns.max_turns:
            raise BudgetExhausted("turns")
        self._fresh = fresh
        if fresh:
            self._conversation.begin(new)
        else:
            self._conversation.extend(new)
        if self._env.recovery != "drop":
            await self._save(len(new))

    async def _save(self, new: int) -> None:
        environment = None
        if self._env.recovery == "snapshot":
            self._refresh()
            where = f"{self._name}.snapshot"
            environment = await guarded(
                where, self._env.snapshot(self._view), limit_s=self._limit_s
            )
            if (reason := not_json(environment)) is not None:
                raise SourceBroken(f"{where} returned no JSON value: {reason}")
        state = {
            "segments": self._turns.segments,
            "turns": self._turns.turns,
            "messages": self._conversation.messages,
            "new": new,
            "fresh": self._fresh,
            "cap": self._cap,
            "metrics": self._view.metrics,
            "environment": environment,
        }
        await self._recorder.save(state)

    def _restore_history(self, saved: Any) -> None:
        last = self._turns.skip(saved["segments"])
        self._turns.turns = saved["turns"]
        self._cap = saved["cap"]
        self._view.metrics = dict(saved["metrics"])
        if last is None or saved["fresh"]:
            self._conversation.begin(saved["messages"])
        else:
            self._conversation.resume(last, saved["messages"], saved["new"])
        self._refresh()

    def _refresh(self) -> None:
        view = self._view
        view.messages = list(self._conversation.messages)
        view.turns = self._turns.turns
        view.generated_tokens = self._turns.generated
        view.context_tokens = self._conversation.context

    async def _read(self, result: object) -> list[Message]:
        self._cap = None
        if isinstance(result, TurnResult):
            self._cap = result.max_turn_tokens
            if self._cap is not None and (isinstance(self._cap, bool) or self._cap < 1):
                raise SourceBroken(
                    f"{self._name}.on_turn capped the next turn at {self._cap!r} tokens; the least "
                    "is 1"
                )
            return await self._messages(result.messages, "on_turn")
        return await self._messages(result, "on_turn")

    async def _messages(self, value: object, hook: str) -> list[Message]:
        where = f"{self._name}.{hook}"
        if not isinstance(value, list):
            raise SourceBroken(
                f"{where} gave a {type(value).__name__}; it must give a list of messages"
            )
        if hook != "on_turn" and not value:
            raise SourceBroken(f"{where} gave no messages")
        for message in value:
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise SourceBroken(
                    f'{where} gave {message!r:.200}; a message is a dict with a "role" of '
                    f"{', '.join(_ROLES)}"
                )
            held = message.get("content")
            if not (held is None or isinstance(held, str | list)):
                raise SourceBroken(
                    f"{where} gave a message whose content is a {type(held).__name__}; it must be "
                    "a string or a list of parts"
                )
        value = await kept(self._recorder, value, self._root)
        cleaned: list[Message] = clean_json(value)
        if (reason := not_json(cleaned)) is not None:
            raise SourceBroken(f"{where} gave messages that are no JSON values: {reason}")
        return cleaned

    def _elided(self, message: Message) -> Message:
        if message["role"] != "tool" or not isinstance(message.get("content"), str):
            return message
        text, left_out = self._chat.elide(content(message), self._tool_output_tokens)
        if not left_out:
            return message
        self._view.count("tool_outputs_elided")
        self._view.count("tool_tokens_elided", left_out)
        return {**message, "content": text}

    async def _close(self) -> None:
        """Close the environment even when the attempt is cancelled, also a second time."""
        closing = asyncio.ensure_future(asyncio.wait_for(self._env.close(), CLOSE_S))
        cancelled = False
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError:
                cancelled = True
        try:
            closing.result()
        except (Exception, asyncio.CancelledError):
            logger.exception(
                "%s.close failed; what it held may be left behind",
                self._name,
                extra={"task": self._view.task.id},
            )
        if cancelled:
            raise asyncio.CancelledError


def _called(message: Message) -> list[str]:
    """Names of the tools that an assistant's message calls."""
    return [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
