"""What the tests of play share: a task, tools, environments."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from activities.chat import Chat
from domain.environments import (
    Env,
    Outcome,
    Recorder,
    Recovery,
    RolloutView,
    TurnResult,
)
from domain.errors import (
    InfrastructureError,
)
from domain.rollouts import Numbers, Task
from domain.tools import Message, Tool, tool


def text(chat: Chat, ids: Numbers) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False))


TASK = Task("t", {"prompt": "12="})


@tool
async def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


@tool
async def fail(kind: str) -> str:
    """Fail as it is told."""
    raise {"infra": InfrastructureError, "net": ConnectionError, "own": ValueError}[kind]("oh no")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Adder(Env):
    tools: Sequence[Tool] = (add, fail)
    recovery: Recovery = "stateless"

    def __init__(self) -> None:
        self.log: list[str] = []  # shared by the rollouts of this environment

    async def reset(self, task: Task) -> list[Message]:
        self.log.append("reset")
        return [{"role": "user", "content": "add"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | TurnResult | None:
        self.log.append(f"turn {rollout.turns}")
        return await super().on_turn(rollout)

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        self.log.append("reward")
        return 1.0 if rollout.messages[-1]["content"] == "5" else 0.0

    async def close(self) -> None:
        self.log.append("close")


class Broken(Adder):
    """Raises or returns what it is given at one hook."""

    def __init__(self, hook: str, what: Any) -> None:
        super().__init__()
        self.hook, self.what = hook, what

    def _at(self, hook: str, value: Any) -> Any:
        if hook != self.hook:
            return value
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what

    async def reset(self, task: Task) -> list[Message]:
        return self._at("reset", await super().reset(task))  # type: ignore[no-any-return]

    async def on_turn(self, rollout: RolloutView) -> Any:
        return self._at("on_turn", await super().on_turn(rollout))

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return self._at("reward", 0.25)  # type: ignore[no-any-return]

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
        return self._at("on_truncated", 0.0)  # type: ignore[no-any-return]


class Counter(Adder):
    """Keeps a running total, which a tool call must add to once only."""

    recovery = "snapshot"

    async def reset(self, task: Task) -> list[Message]:
        self.total = 0
        return await super().reset(task)

    async def on_turn(self, rollout: RolloutView) -> Any:
        answered: Any = await super().on_turn(rollout)
        if answered is None:
            return None
        self.total += int(answered[0]["content"])
        rollout.count("added")
        return answered

    async def snapshot(self, rollout: RolloutView) -> Any:
        return {"total": self.total}

    async def restore(self, rollout: RolloutView, state: Any) -> None:
        self.log.append("restore")
        self.total = state["total"]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return float(self.total)


REPLIES = (call("add", a=2, b=3), call("add", a=10, b=10), "done, and out")


class Session:
    def __init__(self, run: Callable[[Task, Recorder], Any]) -> None:
        self._run = run

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        return await self._run(task, recorder)  # type: ignore[no-any-return]
