"""Code of the user that raises, hangs, cancels or returns something else."""

import asyncio
from typing import Any

import pytest

from activities.chat import Chat
from activities.play import play, rehearse
from domain.environments import (
    Env,
    PromptSource,
    RolloutView,
    TurnResult,
)
from domain.errors import (
    AgentError,
    ConfigError,
    EngineRefused,
    Fenced,
    InfrastructureError,
    SourceBroken,
)
from domain.rollouts import Reward, Status, Task
from domain.tools import Message
from tests.played import REPLIES, TASK, Adder, Broken, Counter
from tests.scripted import Scripted, config


@pytest.mark.parametrize("hook", ["reset", "on_turn", "reward", "on_truncated"])
@pytest.mark.parametrize("error", [KeyError("k"), InfrastructureError("down"), SystemExit(1)])
async def test_user_code_that_raises_is_an_infra_error_that_names_it(
    chat: Chat, hook: str, error: BaseException
) -> None:
    env = Broken(hook, error)
    limits = config(max_generated_tokens=3) if hook == "on_truncated" else config()
    outcome = await play(env, TASK, Scripted(chat, "12345"), config=limits, chat=chat)
    assert (outcome.status, outcome.reward) == (Status.INFRA_ERROR, None)
    assert f"Broken.{hook} raised {type(error).__name__}" in outcome.detail
    assert env.log[-1] == "close"


@pytest.mark.parametrize("hook", ["reset", "on_turn"])
async def test_an_agent_error_is_scored(chat: Chat, hook: str) -> None:
    env = Broken(hook, AgentError("it gave up"))
    outcome = await play(env, TASK, Scripted(chat, "1"), config=config(), chat=chat)
    assert (outcome.status, outcome.reward) == (Status.AGENT_ERROR, Reward(0.25))
    assert outcome.detail == "it gave up"


async def test_an_agent_error_in_the_verifier_is_no_verdict(chat: Chat) -> None:
    env = Broken("reward", AgentError("it gave up"))
    outcome = await play(env, TASK, Scripted(chat, "1"), config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("reset", "hello"),
        ("reset", []),
        ("reset", [{"content": "x"}]),
        ("reset", [{"role": "king", "content": "x"}]),
        ("reset", [{"role": "user", "content": 5}]),
        ("reset", [{"role": "user", "content": "x", "extra": {1, 2}}]),
        ("on_turn", []),
        ("on_turn", 3),
        ("on_turn", TurnResult([{"role": "user", "content": "x"}], max_turn_tokens=0)),
        ("reward", "1"),
    ],
)
async def test_values_of_the_wrong_type_break_the_source(chat: Chat, hook: str, value: Any) -> None:
    env = Broken(hook, value)
    with pytest.raises(SourceBroken, match=f"Broken.{hook}"):
        await play(env, TASK, Scripted(chat, "1"), config=config(), chat=chat)
    assert env.log[-1] == "close"


async def test_a_refusing_engine_is_an_infra_error_with_its_words(chat: Chat) -> None:
    recorder = Scripted(chat, "1")
    recorder.fail_at = (0, EngineRefused("400: prompt too long"))
    outcome = await play(Adder(), TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "400: prompt too long" in outcome.detail


async def test_a_fence_passes_through_and_the_environment_is_closed(chat: Chat) -> None:
    env, recorder = Adder(), Scripted(chat, "1")
    recorder.fail_at = (0, Fenced("another execution"))
    with pytest.raises(Fenced):
        await play(env, TASK, recorder, config=config(), chat=chat)
    assert env.log[-1] == "close"


async def test_a_cancelled_rollout_closes_its_environment_also_when_cancelled_twice(
    chat: Chat,
) -> None:
    started, closing, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    release = asyncio.Event()

    class Slow(Adder):
        async def reset(self, task: Task) -> list[Message]:
            started.set()
            await asyncio.Event().wait()
            return []

        async def close(self) -> None:
            closing.set()
            await release.wait()
            closed.set()

    running = asyncio.ensure_future(play(Slow(), TASK, Scripted(chat), config=config(), chat=chat))
    await started.wait()
    running.cancel()
    await closing.wait()
    running.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed.is_set()


async def test_user_code_that_cancels_itself_is_not_a_cancel(chat: Chat) -> None:
    env = Broken("on_turn", asyncio.CancelledError())
    outcome = await play(env, TASK, Scripted(chat, "1"), config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "cancelled by its own code" in outcome.detail


async def test_rollouts_of_one_environment_do_not_share_what_reset_assigns(chat: Chat) -> None:
    env = Counter()
    outcomes = await asyncio.gather(
        *(play(env, TASK, Scripted(chat, *REPLIES), config=config(), chat=chat) for _ in range(3))
    )
    assert [o.reward for o in outcomes] == [Reward(25.0)] * 3


def test_what_would_fail_every_rollout_is_refused_before_the_run(chat: Chat) -> None:
    source = PromptSource(lambda a, t: 1.0)
    rehearse(source, [TASK], config=config(), chat=chat)
    rehearse(Adder(), [TASK], config=config(), chat=chat)
    with pytest.raises(ConfigError, match=r"task 't': .*cannot encode"):
        rehearse(source, [Task("t", {"prompt": "\u00fc"})], config=config(), chat=chat)
    with pytest.raises(ConfigError, match=r"task 't': .*needs rows with"):
        rehearse(source, [Task("t", {"text": "x"})], config=config(), chat=chat)
    with pytest.raises(ConfigError, match="prompt of 56 tokens, which leaves no room"):
        rehearse(
            source,
            [Task("t", {"prompt": "x" * 39})],
            config=config(max_context_tokens=56),
            chat=chat,
        )


@pytest.mark.parametrize("hook", ["reset", "on_turn", "reward"])
async def test_an_environment_that_takes_too_long_is_named(chat: Chat, hook: str) -> None:
    class Slow(Env):
        async def reset(self, task: Task) -> list[Message]:
            if hook == "reset":
                await asyncio.Event().wait()
            return [{"role": "user", "content": "go"}]

        async def on_turn(self, rollout: RolloutView) -> list[Message] | TurnResult | None:
            if hook == "on_turn":
                await asyncio.Event().wait()
            return None

        async def reward(self, rollout: RolloutView, task: Task) -> float:
            await asyncio.Event().wait()
            return 1.0

    free = config()
    groups = free.groups.model_copy(update={"environment_timeout": 0.02})
    limited = free.model_copy(update={"groups": groups})
    outcome = await play(Slow(), TASK, Scripted(chat, "21"), config=limited, chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert outcome.detail == f"Slow.{hook} took longer than groups.environment_timeout = 0.02 s"
