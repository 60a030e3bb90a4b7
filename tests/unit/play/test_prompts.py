"""A prompt is one turn: its budget, its verifier, what may go wrong."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from activities.chat import Chat
from activities.play import play
from domain.environments import (
    Outcome,
    PromptSource,
)
from domain.errors import (
    Fenced,
    SourceBroken,
)
from domain.rollouts import Reward, Status, Task
from tests.played import TASK, text
from tests.scripted import Scripted, config


async def test_a_prompt_is_one_turn_and_scored(chat: Chat) -> None:
    seen: list[str] = []

    def reward(answer: str, task: Task) -> Reward:
        seen.append(answer)
        return Reward(0.5, {"form": 1})

    recorder = Scripted(chat, "21")
    outcome = await play(PromptSource(reward), TASK, recorder, config=config(), chat=chat)
    assert outcome == Outcome(Status.COMPLETED, Reward(0.5, {"form": 1.0}), turns=1)
    assert seen == ["21"]
    assert text(chat, recorder.segments[0].prompt_ids) == "[user]12=[assistant]"


async def test_verifiers_that_block_hold_up_nobody_else(chat: Chat) -> None:
    all_begun, together = asyncio.Event(), 64
    begun: list[str] = []
    release, loop = threading.Event(), asyncio.get_running_loop()

    def reward(answer: str, task: Task) -> float:
        begun.append(answer)
        if len(begun) == together:
            loop.call_soon_threadsafe(all_begun.set)
        assert release.wait(60)
        return 1.0

    source = PromptSource(reward)
    rollouts = [
        asyncio.create_task(play(source, TASK, Scripted(chat, "2"), config=config(), chat=chat))
        for _ in range(together)
    ]
    try:
        await asyncio.wait_for(all_begun.wait(), 30)
    finally:
        release.set()
    assert [(await rollout).reward for rollout in rollouts] == [Reward(1.0)] * together


async def test_a_verifier_that_raises_stop_iteration_does_not_hang(chat: Chat) -> None:
    source = PromptSource(lambda answer, task: next(float(c) for c in answer if c == "!"))
    playing = play(source, TASK, Scripted(chat, "2"), config=config(), chat=chat)
    outcome = await asyncio.wait_for(playing, 30)
    assert outcome.status is Status.INFRA_ERROR
    assert "StopIteration" in outcome.detail


async def test_a_prompt_that_runs_out_of_tokens_is_truncated_and_scored(chat: Chat) -> None:
    recorder = Scripted(chat, "x" * 500)
    outcome = await play(
        PromptSource(lambda answer, task: float(len(answer))),
        TASK,
        recorder,
        config=config(max_generated_tokens=100, segment_tokens=40),
        chat=chat,
    )
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "tokens")
    assert outcome.reward == Reward(100.0)
    assert [len(s.sampled_ids) for s in recorder.segments] == [40, 40, 20]
    assert recorder.segments[1].prompt_ids == (
        *recorder.segments[0].prompt_ids,
        *recorder.segments[0].sampled_ids,
    )


@pytest.mark.parametrize("committed", [0, 1, 2, 3])
async def test_a_continued_turn_gets_only_the_budget_that_is_left(
    chat: Chat, committed: int
) -> None:
    source = PromptSource(lambda answer, task: float(len(answer)))
    limits = config(max_generated_tokens=100, segment_tokens=40)
    whole = Scripted(chat, "abcde" * 100)
    expected = await play(source, TASK, whole, config=limits, chat=chat)
    first = Scripted(chat, "abcde" * 100)
    first.fail_at = (committed, Fenced("killed"))
    with pytest.raises(Fenced) if committed < 3 else pytest.raises(StopAsyncIteration):
        await play(source, TASK, first, config=limits, chat=chat)
        raise StopAsyncIteration
    second = first.again(segments=committed, states=0)
    assert await play(source, TASK, second, config=limits, chat=chat) == expected
    assert [*first.segments[:committed], *second.segments] == whole.segments


async def test_a_segment_that_was_cancelled_halfway_counts_what_it_had(chat: Chat) -> None:
    source = PromptSource(lambda answer, task: float(len(answer)))
    limits = config(max_generated_tokens=100, segment_tokens=40)
    first = Scripted(chat, "abcde" * 100)
    first.fail_at = (2, Fenced("killed"))
    with pytest.raises(Fenced):
        await play(source, TASK, first, config=limits, chat=chat)
    whole, half = first.segments
    second = first.again(segments=1, states=0)
    second.recorded = [
        whole,
        replace(half, sampled_ids=half.sampled_ids[:20], finish_reason="abort"),
    ]
    outcome = await play(source, TASK, second, config=limits, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "tokens")
    assert outcome.reward == Reward(100.0)
    assert [len(s.sampled_ids) for s in second.segments] == [40]


async def test_an_engine_that_says_nothing_is_an_infra_error(chat: Chat) -> None:
    recorder = Scripted(chat, "")
    recorder.left = [[]]
    outcome = await play(PromptSource(lambda a, t: 1.0), TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "'length' and no tokens" in outcome.detail


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "returned no reward"),
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (True, "returned True"),
        (Reward(1.0, {"form": float("nan")}), "component 'form', returned nan"),
    ],
)
async def test_a_missing_reward_is_an_infra_error_that_names_the_verifier(
    chat: Chat, value: Any, reason: str
) -> None:
    def judge(answer: str, task: Task) -> Any:
        return value

    outcome = await play(PromptSource(judge), TASK, Scripted(chat, "2"), config=config(), chat=chat)
    assert (outcome.status, outcome.reward) == (Status.INFRA_ERROR, None)
    assert "judge" in outcome.detail
    assert reason in outcome.detail


async def test_a_verifier_may_be_a_coroutine_and_may_raise(chat: Chat) -> None:
    async def judge(answer: str, task: Task) -> float:
        raise ValueError("no such column\x00\ud800")

    outcome = await play(PromptSource(judge), TASK, Scripted(chat, "2"), config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "judge" in outcome.detail
    assert "ValueError: no such column" in outcome.detail
    outcome.detail.encode()
    assert "\x00" not in outcome.detail


async def test_a_reward_of_another_type_breaks_the_source(chat: Chat) -> None:
    with pytest.raises(SourceBroken, match="returned a str"):
        await play(
            PromptSource(lambda a, t: "1"),  # type: ignore[arg-type, return-value]
            TASK,
            Scripted(chat, "2"),
            config=config(),
            chat=chat,
        )
    with pytest.raises(SourceBroken, match="task 't' has the prompt None"):
        await play(
            PromptSource(lambda a, t: 1.0), Task("t"), Scripted(chat), config=config(), chat=chat
        )
