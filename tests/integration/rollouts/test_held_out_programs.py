"""Held-out evaluation of harnesses: real programs at the evaluator's own gateway, without a ledger."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activities.album import Album
from activities.chat import Chat
from activities.inference import EngineClient
from domain.config import Evaluation, RunConfig
from domain.environments import HarnessSource, Outcome, Recorder, RolloutView, Source
from domain.errors import EngineRefused, EngineUnavailable
from domain.rollouts import Status, Task
from domain.sources import check
from rollbook.evaluation import Exam
from storage.evaluations import Result
from tests.gateways import Script, call
from tests.living import processes_with
from tests.scripted import config
from tests.stub_engine import StubEngine

PROGRAMS = Path(__file__).parents[2] / "programs"
VERSION = 7
ONE_CALL = """
import os
from openai import OpenAI
said = OpenAI(max_retries=0).chat.completions.create(
    model="m", messages=[{"role": "user", "content": os.environ["ROLLBOOK_TASK_ID"]}])
open("answer.txt", "w").write(said.choices[0].message.content)
"""


def answer(rollout: RolloutView, task: Task) -> float:
    assert rollout.folder is not None
    return float(len((Path(rollout.folder) / "answer.txt").read_text()))


def python(text: str, **env: str) -> HarnessSource:
    return HarnessSource([sys.executable, "-c", text], answer, env=env)


def run_config(**groups: Any) -> RunConfig:
    made = config(max_turns=5, max_generated_tokens=500)
    made = made.model_copy(
        update={
            "evaluation": Evaluation(dataset="held:out", samples=1, temperature=0.3),
            "groups": made.groups.model_copy(update=groups),
        }
    )
    check(HarnessSource(["true"], answer), made)  # nothing refuses it
    return made


Take = Callable[..., Any]


@pytest.fixture
async def take(printable_chat: Chat, engine: StubEngine) -> AsyncIterator[Take]:
    """Evaluates a source on some tasks: `await take(source, tasks)`."""
    engines = EngineClient()

    async def made(
        source: Source, tasks: Sequence[Task], *, samples: int = 1, **groups: Any
    ) -> list[Result]:
        run = run_config(**groups)
        assert run.evaluation is not None
        run = run.model_copy(
            update={"evaluation": run.evaluation.model_copy(update={"samples": samples})}
        )
        exam = Exam(
            config=run,
            chat=printable_chat,
            album=Album(None, None),  # type: ignore[arg-type]
            source=source,
            tasks=tasks,
        )
        async with asyncio.timeout(60):
            return await exam.take(engines, [engine.url], VERSION)

    yield made
    await engines.aclose()


def tasks(number: int) -> list[Task]:
    return [Task(f"t{n}", {"n": n}) for n in range(number)]


async def test_a_program_is_judged_under_the_version_it_is_evaluated_at(
    take: Take, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, [call("add", a=2, b=3), "five"])
    seen: list[RolloutView] = []

    def judge(rollout: RolloutView, task: Task) -> float:
        seen.append(rollout)
        return answer(rollout, task)

    source = HarnessSource([sys.executable, str(PROGRAMS / "openai_loop.py")], judge)
    assert await take(source, tasks(1)) == [
        Result(task="t0", sample=0, status=Status.COMPLETED, reward=4.0)
    ]
    assert [m["role"] for m in seen[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert seen[0].turns == 2
    first, second = engine.requests
    assert {r["model"] for r in engine.requests} == {f"r@{VERSION}"}
    assert {r["sampling_params"]["temperature"] for r in engine.requests} == {0.3}
    assert all(r["priority"] > 0 for r in engine.requests)
    # The ids of the first turn are kept exactly: its prompt, and what was sampled on it.
    (eos,) = printable_chat.stop_ids
    sampled = [*printable_chat.encode(call("add", a=2, b=3)), eos]
    assert second["token_ids"][: len(first["token_ids"]) + len(sampled)] == [
        *first["token_ids"],
        *sampled,
    ]


async def test_rollouts_have_a_key_each_and_what_was_never_asked_is_no_policys_fault(
    take: Take, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["ok"])
    text = "import os\nif os.environ['ROLLBOOK_TASK_ID'] == 't1': raise SystemExit(0)\n" + ONE_CALL
    found = await take(python(text), tasks(4), samples=2)
    assert [(r.task, r.sample) for r in found] == [(f"t{n}", s) for n in range(4) for s in range(2)]
    ends = {r.task: (r.status, r.reward) for r in found}
    assert ends.pop("t1") == (Status.INFRA_ERROR, None)
    assert set(ends.values()) == {(Status.COMPLETED, 2.0)}
    prompts = sorted(printable_chat.text(r["token_ids"])[6:8] for r in engine.requests)
    assert prompts == ["t0", "t0", "t2", "t2", "t3", "t3"]
    assert len({r["sampling_params"]["seed"] for r in engine.requests}) == 6


@pytest.mark.parametrize("trouble", ["away", "broken"])
async def test_an_engine_that_fails_is_no_result(
    take: Take, engine: StubEngine, trouble: str
) -> None:
    if trouble == "away":
        engine.status = 503
    else:
        engine.logprob = float("nan")
    mark = secrets.token_hex(8)
    lasting = ONE_CALL.replace(
        "said =", "import subprocess\nsubprocess.Popen(['sleep', '600'])\nsaid ="
    )
    with pytest.raises(EngineUnavailable if trouble == "away" else EngineRefused):
        await take(python(lasting, MARK=mark), tasks(3))
    assert processes_with(mark) == []


async def test_a_program_has_the_time_of_an_attempt_and_leaves_nothing(
    take: Take, engine: StubEngine
) -> None:
    mark = secrets.token_hex(8)
    source = HarnessSource(["bash", str(PROGRAMS / "unruly.sh")], answer, env={"MARK": mark})
    found = await take(source, tasks(2), timeout=2.0)
    assert [(r.status, r.reward) for r in found] == [(Status.CANCELLED, None)] * 2
    assert processes_with(mark) == []


class Sampling:
    """A session of the user's own that hands the gateway to a client."""

    gateway = True

    def __init__(self) -> None:
        self.left: list[tuple[str, str]] = []

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        from openai import AsyncOpenAI

        self.left.append((recorder.base_url, recorder.api_key))
        async with AsyncOpenAI(base_url=recorder.base_url, api_key=recorder.api_key) as client:
            said: Any = [{"role": "user", "content": "hello"}]
            found = await client.chat.completions.create(model="m", messages=said)
            if task.id == "t1":  # another rollout's session is not this one's
                other = client.with_options(base_url=self.left[0][0].replace("/0/0/", "/5/0/"))
                with pytest.raises(Exception, match="no session has this key"):
                    await other.chat.completions.create(model="m", messages=said)
        return Outcome(Status.COMPLETED, reward=float(len(found.choices[0].message.content or "")))


async def test_a_session_that_samples_at_the_gateway_is_evaluated_too(
    take: Take, engine: StubEngine, printable_chat: Chat
) -> None:
    engine.say = Script(printable_chat, ["okay"])
    found = await take(Sampling(), tasks(2))
    assert [replace(r, task="") for r in found] == [
        Result(task="", sample=0, status=Status.COMPLETED, reward=4.0)
    ] * 2
