"""However often a rollout's workers die, what is recorded is what one life would have recorded."""

import asyncio
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from activities.chat import Chat
from activities.play import play
from domain.environments import Env, Recovery, RolloutView
from domain.errors import Fenced
from domain.rollouts import Task
from domain.tools import Message, tool
from tests.scripted import Scripted, config, printable

TASK = Task("t")


@cache
def chat() -> Chat:
    with TemporaryDirectory() as folder:
        return printable(Path(folder))


class Totals(Env):
    """Adds what it is told; sometimes it starts its history anew."""

    recovery: Recovery = "snapshot"

    @tool
    async def add(self, n: int) -> str:
        """Add a number."""
        self.total += n
        return f"the total is {self.total}"

    @property
    def tools(self) -> Any:  # type: ignore[override]
        return (self.add,)

    async def reset(self, task: Task) -> list[Message]:
        self.total = 0
        return [{"role": "user", "content": "add up"}]

    async def on_turn(self, rollout: RolloutView) -> Any:
        answers = await super().on_turn(rollout)
        if answers is not None and self.total % 5 == 0:
            rollout.rewrite([{"role": "user", "content": f"so far {self.total}"}])
        return answers

    async def snapshot(self, rollout: RolloutView) -> Any:
        return self.total

    async def restore(self, rollout: RolloutView, state: Any) -> None:
        self.total = state

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return float(self.total)

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
        return -float(self.total)


def call(n: int) -> str:
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': {'n': n}})}</tool_call>"


@given(
    numbers=st.lists(st.integers(0, 9), max_size=5),
    segment_tokens=st.integers(5, 80),
    max_generated_tokens=st.integers(30, 400),
    reserve=st.sampled_from([0, 0, 15]),
    lives=st.lists(st.integers(0, 3), max_size=6),
)
def test_lives_add_up(
    numbers: list[int],
    segment_tokens: int,
    max_generated_tokens: int,
    reserve: int,
    lives: list[int],
) -> None:
    replies = [*(call(n) for n in numbers), "that is all"]
    limits = config(
        segment_tokens=segment_tokens,
        max_generated_tokens=max_generated_tokens,
        final_answer_reserve=reserve,
    )

    def recorder() -> Scripted:
        # After a call to answer the model goes on with its next reply.
        return Scripted(chat(), *replies, "the end" * 3)

    async def run() -> None:
        whole = recorder()
        expected = await play(Totals(), TASK, whole, config=limits, chat=chat())
        life = recorder()
        recorded = list(life.recorded)
        for segments in lives:
            life.fail_at = (segments, Fenced("killed"))
            try:
                outcome = await play(Totals(), TASK, life, config=limits, chat=chat())
            except Fenced:
                recorded += life.segments
                following = life.again(segments=segments, states=len(life.states))
                following.recorded = list(recorded)
                life = following
                continue
            break
        else:
            life.fail_at = None
            outcome = await play(Totals(), TASK, life, config=limits, chat=chat())
        assert outcome == expected
        assert [*recorded, *life.segments] == whole.segments

    asyncio.run(run())


def test_the_property_is_not_vacuous() -> None:
    async def run() -> Any:
        return await play(
            Totals(), TASK, Scripted(chat(), call(3), call(4), "done"), config=config(), chat=chat()
        )

    outcome = asyncio.run(run())
    assert outcome.reward.value == 7.0
    assert outcome.turns == 3
