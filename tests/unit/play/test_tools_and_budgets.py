"""An environment: tools, their output, budgets and their causes."""

import json

import pytest

from activities.chat import Chat
from activities.play import play
from activities.turns import ANSWER_NOW
from domain.chains import merge
from domain.environments import (
    RolloutView,
    TurnResult,
)
from domain.errors import (
    SourceBroken,
)
from domain.rollouts import Reward, Status, Task
from domain.tools import Message, tool
from tests.played import TASK, Adder, call, text
from tests.scripted import Scripted, config


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


@pytest.mark.parametrize(
    ("budget", "cause"), [({"max_generated_tokens": 10}, "tokens"), ({"max_turns": 1}, "turns")]
)
async def test_on_truncated_may_judge_what_the_model_said_last(
    chat: Chat, budget: dict[str, int], cause: str
) -> None:
    class Judge(Adder):
        async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
            assert rollout.messages[-1]["role"] == "assistant"
            return -1.0

    recorder = Scripted(chat, call("add", a=1), "5")
    outcome = await play(Judge(), TASK, recorder, config=config(**budget), chat=chat)
    assert (outcome.status, outcome.cause, outcome.reward) == (
        Status.TRUNCATED,
        cause,
        Reward(-1.0),
    )


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


async def test_the_reserve_is_kept_back_of_the_context_too(chat: Chat) -> None:
    recorder = Scripted(chat, "x" * 400, "5")
    recorder.left[0] = recorder.left[0][:300]
    begun = len(chat.prompt([{"role": "user", "content": "add"}], [t.schema for t in Adder.tools]))
    outcome = await play(
        Adder(),
        TASK,
        recorder,
        config=config(max_context_tokens=begun + 400, final_answer_reserve=100),
        chat=chat,
    )
    first, second = recorder.segments
    assert len(first.prompt_ids) + len(first.sampled_ids) == begun + 300
    assert outcome.reward == Reward(1.0)
    assert len(second.prompt_ids) + len(second.sampled_ids) <= begun + 400


async def test_no_cap_of_a_turn_is_a_reason_to_answer_nor_one_of_the_answer(chat: Chat) -> None:
    class Capped(Adder):
        async def on_turn(self, rollout: RolloutView) -> TurnResult:
            return TurnResult([{"role": "user", "content": "short"}], max_turn_tokens=4)

    limits = config(max_generated_tokens=100, final_answer_reserve=20, max_turn_tokens=50)
    recorder = Scripted(chat, "a turn", "123456789", "5")
    outcome = await play(Capped(), TASK, recorder, config=limits, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "turn_tokens")
    assert len(recorder.segments) == 2

    limits = config(max_generated_tokens=24, final_answer_reserve=20)
    recorder = Scripted(chat, "abc", "123456789")  # the cap is of the turn that is not taken
    outcome = await play(Capped(), TASK, recorder, config=limits, chat=chat)
    assert outcome.status is Status.COMPLETED
    assert [len(s.sampled_ids) for s in recorder.segments] == [4, 10]


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


@pytest.mark.parametrize(("of_turn", "of_run"), [(4, 9), (9, 4)])
async def test_of_two_caps_the_lower_one_holds(chat: Chat, of_turn: int, of_run: int) -> None:
    class Capped(Adder):
        async def on_turn(self, rollout: RolloutView) -> TurnResult:
            return TurnResult([{"role": "user", "content": "short"}], max_turn_tokens=of_turn)

    recorder = Scripted(chat, "abc", "123456789")
    limits = config(max_turn_tokens=of_run)
    outcome = await play(Capped(), TASK, recorder, config=limits, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "turn_tokens")
    assert [len(s.sampled_ids) for s in recorder.segments] == [4, 4]


async def test_a_cap_is_for_one_turn(chat: Chat) -> None:
    class Once(Adder):
        async def on_turn(self, rollout: RolloutView) -> TurnResult | list[Message] | None:
            more: list[Message] = [{"role": "user", "content": "go on"}]
            match rollout.turns:
                case 1:
                    return TurnResult(more, max_turn_tokens=4)
                case 2:
                    return more
            return None

    recorder = Scripted(chat, "abc", "def", "123456789")
    outcome = await play(Once(), TASK, recorder, config=config(), chat=chat)
    assert outcome.status is Status.COMPLETED
    assert [len(s.sampled_ids) for s in recorder.segments] == [4, 4, 10]


async def test_what_is_no_tool_output_is_never_elided(chat: Chat) -> None:
    class Teller(Adder):
        async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
            return [{"role": "user", "content": "x" * 2000}] if rollout.turns == 1 else None

    recorder = Scripted(chat, "a", "b")
    outcome = await play(Teller(), TASK, recorder, config=config(tool_output_tokens=20), chat=chat)
    assert "x" * 2000 in text(chat, recorder.segments[1].prompt_ids)
    assert "tool_outputs_elided" not in outcome.metrics


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
