"""A session drives its own conversation, within the same rules."""

from typing import Any

import pytest

from activities.chat import Chat
from activities.play import play
from domain.environments import (
    Outcome,
    Recorder,
)
from domain.errors import (
    SourceBroken,
)
from domain.rollouts import Reward, Status, Task
from domain.tools import Message
from tests.played import TASK, Session, text
from tests.scripted import Scripted, config


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


async def test_after_its_final_answer_a_session_takes_no_further_turn(chat: Chat) -> None:
    said: list[Message] = []

    async def run(task: Task, recorder: Recorder) -> Outcome:
        while True:
            said.append(await recorder.chat([{"role": "user", "content": "hi"}]))

    recorder = Scripted(chat, "abc", "the end", "one more")
    limits = config(max_generated_tokens=24, final_answer_reserve=20)
    outcome = await play(Session(run), TASK, recorder, config=limits, chat=chat)
    assert (outcome.status, outcome.cause) == (Status.TRUNCATED, "turns")
    assert [message["content"] for message in said] == ["abc", "the end"]


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
