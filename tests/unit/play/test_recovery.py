"""A rollout whose worker died is taken up token by token, or is a loss."""

import pytest

from activities.chat import Chat
from activities.play import play
from domain.environments import Outcome, PromptSource, RolloutView, TurnResult
from domain.errors import (
    Fenced,
)
from domain.rollouts import Reward, Segment, Status
from domain.tools import Message
from tests.played import REPLIES, TASK, Adder, Counter, call
from tests.scripted import Scripted, config


async def test_a_rollout_is_taken_up_wherever_its_worker_died(chat: Chat) -> None:
    limits = config(segment_tokens=30)
    whole = Scripted(chat, *REPLIES)
    expected = await play(Counter(), TASK, whole, config=limits, chat=chat)
    assert expected.reward == Reward(25.0)
    assert len(whole.segments) > 4
    for died in range(len(whole.segments)):
        first = Scripted(chat, *REPLIES)
        first.fail_at = (died, Fenced("killed"))
        with pytest.raises(Fenced):
            await play(Counter(), TASK, first, config=limits, chat=chat)
        second = first.again(segments=died, states=len(first.states))
        env = Counter()
        assert await play(env, TASK, second, config=limits, chat=chat) == expected
        assert [*first.segments, *second.segments] == whole.segments
        assert env.log[0] == "restore"


async def test_a_stateless_environment_is_reset_and_its_answered_calls_are_not_run_again(
    chat: Chat,
) -> None:
    whole = Scripted(chat, call("add", a=2, b=3), "5")
    expected = await play(Adder(), TASK, whole, config=config(), chat=chat)
    first = Scripted(chat, call("add", a=2, b=3), "5")
    first.fail_at = (1, Fenced("killed"))
    with pytest.raises(Fenced):
        await play(Adder(), TASK, first, config=config(), chat=chat)
    env = Adder()
    second = first.again(segments=1, states=len(first.states))
    assert await play(env, TASK, second, config=config(), chat=chat) == expected
    assert env.log == ["reset", "turn 2", "reward", "close"]
    assert [*first.segments, *second.segments] == whole.segments


@pytest.mark.parametrize("died", [1, 2])
async def test_budgets_and_caps_go_on_where_they_stood(chat: Chat, died: int) -> None:
    class Capped(Adder):
        async def on_turn(self, rollout: RolloutView) -> TurnResult:
            more: list[Message] = [{"role": "user", "content": "go on"}]
            return TurnResult(more, max_turn_tokens=20 if rollout.turns == 1 else None)

    async def played(recorder: Scripted, **budget: int) -> Outcome:
        limits = config(segment_tokens=10, **budget)
        return await play(Capped(), TASK, recorder, config=limits, chat=chat)

    for budget, cause in (({"max_generated_tokens": 25}, "tokens"), ({}, "turn_tokens")):
        whole = Scripted(chat, "abcdefg", "x" * 40)
        expected = await played(whole, **budget)
        assert (expected.status, expected.cause) == (Status.TRUNCATED, cause)
        first = Scripted(chat, "abcdefg", "x" * 40)
        first.fail_at = (died, Fenced("killed"))
        with pytest.raises(Fenced):
            await played(first, **budget)
        second = first.again(segments=died, states=len(first.states))
        assert await played(second, **budget) == expected
        assert [*first.segments, *second.segments] == whole.segments


async def test_a_rewritten_chain_is_taken_up_too(chat: Chat) -> None:
    class Forgetful(Adder):
        async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
            if rollout.turns == 2:
                return None
            rollout.rewrite([{"role": "user", "content": "summary"}])
            return [{"role": "user", "content": "go on"}]

    whole = Scripted(chat, "abc", "5")
    expected = await play(Forgetful(), TASK, whole, config=config(), chat=chat)
    first = Scripted(chat, "abc", "5")
    first.fail_at = (1, Fenced("killed"))
    with pytest.raises(Fenced):
        await play(Forgetful(), TASK, first, config=config(), chat=chat)
    second = first.again(segments=1, states=len(first.states))
    assert await play(Forgetful(), TASK, second, config=config(), chat=chat) == expected
    assert [*first.segments, *second.segments] == whole.segments


async def test_without_recovery_a_dead_worker_is_a_loss(chat: Chat) -> None:
    class Dropped(Adder):
        recovery = "drop"

    first = Scripted(chat, call("add", a=1), "5")
    await play(Dropped(), TASK, first, config=config(), chat=chat)
    assert first.states == []
    second = first.again(segments=1, states=0)
    outcome = await play(Dropped(), TASK, second, config=config(), chat=chat)
    assert (outcome.status, outcome.lost) == (Status.INFRA_ERROR, True)


async def test_recorded_segments_of_another_prompt_are_a_loss(chat: Chat) -> None:
    source = PromptSource(lambda a, t: 1.0)
    recorder = Scripted(chat, "x")
    recorder.recorded = [Segment((1, 2), (3,), (0.0,), "length", 7)]
    outcome = await play(source, TASK, recorder, config=config(), chat=chat)
    assert (outcome.status, outcome.lost) == (Status.INFRA_ERROR, True)
