"""Playing rollouts: budgets, tools, outcomes and resuming, against a scripted model."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from activities.chat import Chat
from activities.play import play, rehearse
from activities.turns import ANSWER_NOW
from domain.chains import merge
from domain.environments import (
    Env,
    Outcome,
    PromptSource,
    Recorder,
    Recovery,
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
from domain.rollouts import Numbers, Reward, Segment, Status, Task
from domain.tools import Message, Tool, tool
from tests.scripted import Scripted, config, printable


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return printable(tmp_path_factory.mktemp("model"))


def text(chat: Chat, ids: Numbers) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False))


TASK = Task("t", {"prompt": "12="})


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


async def test_tool_calls_are_run_and_answered(chat: Chat) -> None:
    env = Adder()
    recorder = Scripted(chat, call("add", a=2, b=3), "5")
    outcome = await play(env, TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.COMPLETED
    assert outcome.reward == Reward(1.0)
    assert outcome.turns == 2
    assert outcome.metrics["tool_calls"] == 1
    assert env.log == ["reset", "turn 1", "turn 2", "reward", "close"]
    first, second = recorder.segments
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.sampled_ids)] == (
        *first.prompt_ids,
        *first.sampled_ids,
    )
    delta = second.prompt_ids[len(first.prompt_ids) + len(first.sampled_ids) :]
    assert text(chat, delta) == "[tool]5[assistant]"


async def test_what_tools_say_is_context_and_never_trained(chat: Chat) -> None:
    @tool
    async def dump() -> str:
        """Print much."""
        return "x" * 2000

    class Dumper(Adder):
        tools = (dump,)

    recorder = Scripted(chat, call("dump"), "5")
    await play(Dumper(), TASK, recorder, config=config(), chat=chat)
    (chain,) = merge(recorder.segments)
    assert sum(span.stop - span.start for span in chain.spans) == sum(
        len(s.sampled_ids) for s in recorder.segments
    )
    assert [tuple(chain.ids[s.start : s.stop]) for s in chain.spans] == [
        s.sampled_ids for s in recorder.segments
    ]
    assert len(chain) > 2000


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<tool_call>{no json</tool_call>", "malformed tool call"),
        ("<tool_call>[1]</tool_call>", "malformed tool call"),
        ("<tool_call>" + json.dumps({"name": "add"}), "a: Field required"),
        (call("subtract", a=1), "no tool 'subtract'; tools: add, fail"),
        (call("add", a="x"), "a: Input should be a valid integer"),
        (call("add", a=1, c=2), "c: Extra inputs are not permitted"),
        (call("fail", kind="own"), "fail raised ValueError: oh no"),
    ],
)
async def test_what_goes_wrong_in_a_call_is_told_to_the_model(
    chat: Chat, said: str, answer: str
) -> None:
    recorder = Scripted(chat, said, "5")
    outcome = await play(Adder(), TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.COMPLETED
    assert answer in text(chat, recorder.segments[1].prompt_ids)
    assert outcome.metrics["tool_errors"] == 1


@pytest.mark.parametrize("kind", ["infra", "net"])
async def test_infrastructure_under_a_tool_is_an_infra_error(chat: Chat, kind: str) -> None:
    env = Adder()
    recorder = Scripted(chat, call("fail", kind=kind), "5")
    outcome = await play(env, TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "oh no" in outcome.detail
    assert env.log[-1] == "close"
    assert "reward" not in env.log


async def test_long_tool_output_is_elided_in_the_middle_and_counted(chat: Chat) -> None:
    @tool
    async def dump() -> str:
        """Print much."""
        return "<" + "x" * 1998 + ">"

    class Dumper(Adder):
        tools = (dump,)

    recorder = Scripted(chat, call("dump"), "5")
    outcome = await play(Dumper(), TASK, recorder, config=config(tool_output_tokens=20), chat=chat)
    prompt = text(chat, recorder.segments[1].prompt_ids)
    assert "[tool]<xxxxxxxxx\n[.. 1980 tokens left out ..]\nxxxxxxxxx>[assistant]" in prompt
    assert outcome.metrics["tool_outputs_elided"] == 1
    assert outcome.metrics["tool_tokens_elided"] == 1980


@pytest.mark.parametrize(
    ("budget", "cause"),
    [
        ({"max_turns": 1}, "turns"),
        ({"max_generated_tokens": 60}, "tokens"),
        ({"max_turn_tokens": 20}, "turn_tokens"),
        ({"max_context_tokens": 600}, "context"),
    ],
)
async def test_a_used_up_budget_truncates_with_its_cause(
    chat: Chat, budget: dict[str, int], cause: str
) -> None:
    recorder = Scripted(chat, *[call("add", a=1, b=1)] * 50)
    outcome = await play(Adder(), TASK, recorder, config=config(**budget), chat=chat)
    assert (outcome.status, outcome.cause, outcome.reward) == (Status.TRUNCATED, cause, None)
    sampled = sum(len(s.sampled_ids) for s in recorder.segments)
    assert sampled <= budget.get("max_generated_tokens", 10**6)
    assert all(
        len(s.prompt_ids) + len(s.sampled_ids) <= budget.get("max_context_tokens", 10**6)
        for s in recorder.segments
    )


async def test_on_truncated_may_judge(chat: Chat) -> None:
    class Judge(Adder):
        async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
            assert rollout.messages[-1]["role"] == "assistant"
            return -1.0

    recorder = Scripted(chat, "x" * 100)
    outcome = await play(Judge(), TASK, recorder, config=config(max_generated_tokens=10), chat=chat)
    assert (outcome.status, outcome.reward) == (Status.TRUNCATED, Reward(-1.0))


async def test_the_group_deadline_stops_at_a_segment_border(chat: Chat) -> None:
    recorder = Scripted(chat, "x" * 100)
    recorder.deadline_after = 2
    outcome = await play(Adder(), TASK, recorder, config=config(segment_tokens=10), chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "group_deadline")
    assert len(recorder.segments) == 2


async def test_with_a_reserve_the_model_is_told_once_to_answer(chat: Chat) -> None:
    recorder = Scripted(chat, "x" * 200, "5")
    recorder.left[0] = recorder.left[0][:80]  # it would go on; the budget stops it at 80
    outcome = await play(
        Adder(),
        TASK,
        recorder,
        config=config(max_generated_tokens=100, final_answer_reserve=20),
        chat=chat,
    )
    assert outcome.status is Status.COMPLETED
    assert outcome.reward == Reward(1.0)
    assert outcome.turns == 2
    first, second = recorder.segments
    assert len(first.sampled_ids) == 80
    delta = second.prompt_ids[len(first.prompt_ids) + 80 :]
    assert text(chat, delta) == f"<eos>[user]{ANSWER_NOW['content']}[assistant]"


async def test_the_final_answer_too_has_an_end(chat: Chat) -> None:
    recorder = Scripted(chat, "x" * 80, "y" * 200, ended=False)
    outcome = await play(
        Adder(),
        TASK,
        recorder,
        config=config(max_generated_tokens=100, final_answer_reserve=20),
        chat=chat,
    )
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "tokens")
    assert [len(s.sampled_ids) for s in recorder.segments] == [80, 20]


async def test_between_turns_the_call_to_answer_joins_the_new_messages(chat: Chat) -> None:
    said = call("add", a=1)
    used = len(chat.encode(said)) + 1
    recorder = Scripted(chat, said, "5")
    outcome = await play(
        Adder(),
        TASK,
        recorder,
        config=config(max_generated_tokens=used + 5, final_answer_reserve=5),
        chat=chat,
    )
    assert outcome.reward == Reward(1.0)
    assert text(chat, recorder.segments[1].prompt_ids).endswith(
        f"[tool]2[user]{ANSWER_NOW['content']}[assistant]"
    )


async def test_rewriting_the_history_starts_a_chain(chat: Chat) -> None:
    class Forgetful(Adder):
        async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
            if rollout.turns == 2:
                return None
            rollout.messages.clear()  # has no effect
            rollout.rewrite([{"role": "user", "content": "summary"}])
            return []

    recorder = Scripted(chat, "abc", "5")
    outcome = await play(Forgetful(), TASK, recorder, config=config(), chat=chat)
    assert outcome.reward == Reward(1.0)
    assert text(chat, recorder.segments[1].prompt_ids).endswith("[user]summary[assistant]")
    assert "abc" not in text(chat, recorder.segments[1].prompt_ids)
    assert outcome.metrics["chains_rewritten"] == 1
    assert len(merge(recorder.segments)) == 2


async def test_an_environment_may_cap_the_next_turn(chat: Chat) -> None:
    class Capped(Adder):
        async def on_turn(self, rollout: RolloutView) -> TurnResult:
            return TurnResult([{"role": "user", "content": "short"}], max_turn_tokens=4)

    recorder = Scripted(chat, "a longer turn", "123456789")
    outcome = await play(Capped(), TASK, recorder, config=config(), chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "turn_tokens")
    assert [len(s.sampled_ids) for s in recorder.segments] == [14, 4]


async def test_images_are_counted_before_they_are_rendered(chat: Chat) -> None:
    class Painter(Adder):
        async def reset(self, task: Task) -> list[Message]:
            return [{"role": "user", "content": "look"}]

        async def on_turn(self, rollout: RolloutView) -> list[Message]:
            return [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]

    outcome = await play(
        Painter(), TASK, Scripted(chat, "a", "b"), config=config(max_images=0), chat=chat
    )
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "images")
    with pytest.raises(SourceBroken, match="takes text only"):
        await play(Painter(), TASK, Scripted(chat, "a", "b"), config=config(), chat=chat)


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


class Session:
    def __init__(self, run: Callable[[Task, Recorder], Any]) -> None:
        self._run = run

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        return await self._run(task, recorder)  # type: ignore[no-any-return]


async def test_a_session_drives_its_own_conversation(chat: Chat) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        messages: list[Message] = [{"role": "user", "content": "hi"}]
        messages.append(await recorder.chat(messages))
        messages.append({"role": "user", "content": "and?"})
        messages.append(await recorder.chat(messages))
        await recorder.chat([{"role": "user", "content": "another"}])
        return Outcome(Status.COMPLETED, reward=len(messages))

    recorder = Scripted(chat, "hello", "more", "new")
    outcome = await play(Session(run), TASK, recorder, config=config(), chat=chat)
    assert outcome == Outcome(Status.COMPLETED, Reward(4.0), turns=3)
    prompts = [text(chat, s.prompt_ids) for s in recorder.segments]
    assert prompts == [
        "[user]hi[assistant]",
        "[user]hi[assistant]hello<eos>[user]and?[assistant]",
        "[user]another[assistant]",
    ]


async def test_a_session_is_held_to_its_budget(chat: Chat) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        while True:
            await recorder.sample([1, 2, 3], max_tokens=30)

    recorder = Scripted(chat, "x" * 1000)
    outcome = await play(
        Session(run), TASK, recorder, config=config(max_generated_tokens=70), chat=chat
    )
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "tokens")
    assert [len(s.sampled_ids) for s in recorder.segments] == [30, 30, 10]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(Status.COMPLETED), Status.INFRA_ERROR),
        (Outcome(Status.COMPLETED, float("nan")), Status.INFRA_ERROR),
        (Outcome(Status.CANCELLED), Status.CANCELLED),
        (Outcome(Status.TRUNCATED, cause="tokens"), Status.TRUNCATED),
    ],
)
async def test_what_a_session_returns_is_checked(
    chat: Chat, outcome: Outcome, expected: Status
) -> None:
    async def run(task: Task, recorder: Recorder) -> Outcome:
        return outcome

    found = await play(Session(run), TASK, Scripted(chat), config=config(), chat=chat)
    assert (found.status, found.reward) == (expected, None)


@pytest.mark.parametrize(
    "outcome",
    [None, 1.0, Outcome(Status.COMPLETED, 1.0, cause="tokens"), Outcome(Status.TRUNCATED, 1.0),
     Outcome("fine", 1.0), Outcome(Status.COMPLETED, "1")],  # type: ignore[arg-type]
)  # fmt: skip
async def test_a_session_that_breaks_its_contract_fails_the_run(chat: Chat, outcome: Any) -> None:
    async def run(task: Task, recorder: Recorder) -> Any:
        return outcome

    with pytest.raises(SourceBroken, match=r"Session\.run"):
        await play(Session(run), TASK, Scripted(chat), config=config(), chat=chat)


async def test_an_exception_of_a_session_is_an_infra_error(chat: Chat) -> None:
    async def run(task: Task, recorder: Recorder) -> Any:
        raise OSError("disk full")

    outcome = await play(Session(run), TASK, Scripted(chat), config=config(), chat=chat)
    assert outcome.status is Status.INFRA_ERROR
    assert "Session.run raised OSError: disk full" in outcome.detail


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
