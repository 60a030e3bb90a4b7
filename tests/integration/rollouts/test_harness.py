"""Programs as agents: two real ones from PyPI, ones that misbehave, and ones that are cancelled."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.attempt import Attempts
from activities.chat import Chat
from activities.inference import EngineClient
from activities.programs import running
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.environments import HarnessSource, Outcome, Recorder, RolloutView, Source
from domain.errors import ConfigError
from domain.messages import AttemptIn, AttemptRef
from domain.rollouts import Reward, Status, Task
from domain.sources import check
from storage import segments
from tests.attempted import BY_TEMPORAL, failure, limited
from tests.gateways import Running, Script, call, gateway
from tests.living import processes_with
from tests.stub_engine import StubEngine

Make = Callable[..., Any]

PROGRAMS = Path(__file__).parents[2] / "programs"
ONE_CALL = """
import os
from openai import OpenAI
OpenAI(max_retries=0).chat.completions.create(
    model="m", messages=[{"role": "user", "content": os.environ.get("SAY", "hello")}])
"""


def answer(rollout: RolloutView, task: Task) -> Reward:
    """The length of what the program wrote as its answer."""
    assert rollout.folder is not None
    text = (Path(rollout.folder) / "answer.txt").read_text()
    return Reward(float(len(text)), {"turns": float(rollout.turns)})


def one(rollout: RolloutView, task: Task) -> float:
    return 1.0


def python(text: str, **env: str) -> HarnessSource:
    return HarnessSource([sys.executable, "-c", text], one, env=env)


@dataclass
class Knows:
    setup: Setup

    async def get(self, run: str, environment: str) -> Setup:
        return self.setup


@dataclass
class Lab:
    """A gateway and rollout workers around one run."""

    bench: Any
    chat: Chat
    gate: Running
    engines: EngineClient = field(default_factory=EngineClient)

    async def play(
        self, source: Source, i: AttemptIn, environment: ActivityEnvironment | None = None
    ) -> AttemptRef:
        b = self.bench
        sampler = Sampler(b.ledger, self.engines, Router(b.ledger))
        knows = Knows(Setup(config=b.config, source=source, chat=self.chat))
        attempts = Attempts(sampler, knows, worker="w", gateway=self.gate.url)  # type: ignore[arg-type]
        result: AttemptRef = await (environment or limited(60)).run(attempts.run_attempt, i)
        return result


@pytest.fixture
async def lab(sampled_run: Make, printable_chat: Chat) -> AsyncIterator[Callable[..., Any]]:
    """Makes a lab: `await lab(budget={...})`."""
    opened: list[Any] = []

    async def make(**sections: Any) -> Lab:
        b = sampled_run(**sections)
        serving = gateway(b, printable_chat)
        made = Lab(b, printable_chat, await serving.__aenter__())
        opened.append((serving, made))
        return made

    yield make
    for serving, made in opened:
        await serving.__aexit__(None, None, None)
        await made.engines.aclose()


async def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - processes and a database have no event
            await asyncio.sleep(0.02)


async def test_a_loop_over_the_openai_client_with_tools(lab: Any, engine: StubEngine) -> None:
    made = await lab()
    b = made.bench
    engine.say = Script(
        made.chat, [call("add", a=2, b=3), "so" + call("multiply", a=5, b=7), "thirty-five"]
    )
    source = HarnessSource([sys.executable, str(PROGRAMS / "openai_loop.py")], judged)
    group = b.group()
    ref = await made.play(source, b.key(group, 0))
    assert (ref.status, ref.reward, ref.turns, ref.member) == ("completed", 11.0, 3, True)
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [p.chain for p in places] == [0, 0, 0]
    told = made.chat.text([int(i) for i in read[2].prompt_ids])
    assert "[tool]5" in told
    assert "[tool]35" in told
    key = b.one("SELECT revoked_at FROM gateway_keys WHERE run_id = %s", b.run)
    assert key["revoked_at"] is not None
    assert not any(os.path.exists(folder) for folder in worked_in)  # noqa: ASYNC240


worked_in: list[str] = []


def judged(rollout: RolloutView, task: Task) -> Reward:
    """Checks what a verifier gets to see, and that the worker's secrets did not leak."""
    assert rollout.folder is not None
    worked_in.append(rollout.folder)
    variables = json.loads((Path(rollout.folder) / "environment.json").read_text())
    assert not [name for name in variables if name.startswith(("AWS_", "PG", "PYTEST"))]
    roles = [message["role"] for message in rollout.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert rollout.messages[0]["content"] == "task 1"
    assert rollout.messages[3]["content"] == "so"
    assert rollout.messages[-1]["content"] == "thirty-five"
    assert rollout.generated_tokens > 11
    return answer(rollout, task)


async def test_a_ready_made_agent_that_streams(lab: Any, engine: StubEngine) -> None:
    made = await lab()
    b = made.bench
    engine.say = Script(made.chat, [call("add", a=2, b=3), "It is 5."])
    source = HarnessSource([sys.executable, str(PROGRAMS / "ready_made.py")], answer)
    group = b.group()
    ref = await made.play(source, b.key(group, 0))
    assert (ref.status, ref.reward, ref.turns) == ("completed", 8.0, 2)
    assert [p.chain for p in b.ledger.call(segments.places, b.run, group, 0, 0)] == [0, 0]


async def test_how_programs_end_and_what_becomes_of_it(lab: Any, engine: StubEngine) -> None:
    made = await lab(budget={"max_context_tokens": 300}, groups={"size": 8})
    b = made.bench
    engine.say = Script(made.chat, ["ok"])
    group = b.group()
    ends = await asyncio.gather(
        made.play(python(ONE_CALL + "\nraise SystemExit(3)"), b.key(group, 0)),
        made.play(python(ONE_CALL, SAY="x" * 400), b.key(group, 1)),
        failure(made.play(python("print('hello')"), b.key(group, 2))),
        failure(made.play(HarnessSource(["no-such-program"], one), b.key(group, 3))),
        failure(made.play(HarnessSource(["true"], one, workdir="nowhere"), b.key(group, 4))),
        failure(made.play(HarnessSource(["echo", "{what}"], one), b.key(group, 5))),
    )
    broke, truncated, silent, absent, folderless, wordless = ends
    assert (broke.status, broke.reward, broke.member) == ("agent_error", 1.0, True)
    assert "exited with 3" in b.attempt(group, 0)["error"]
    assert (truncated.status, truncated.cause) == ("truncated", "context")
    assert silent[0] == "INFRA_ERROR"
    assert "OPENAI_BASE_URL" in silent[1]
    assert absent[0] == "INFRA_ERROR"
    assert "cannot start ['no-such-program']" in absent[1]
    assert "there is no folder" in folderless[1]
    assert wordless[0] == "SOURCE_BROKEN"
    assert "{what}" in wordless[1]


async def test_a_verifier_may_be_a_command(lab: Any, engine: StubEngine, tmp_path: Path) -> None:
    made = await lab(root=str(tmp_path))
    b = made.bench
    engine.say = Script(made.chat, ["ok"])
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "hint.txt").write_text("7")
    verifier = (
        "import json, os; told = json.load(open(os.environ['ROLLBOOK_ROLLOUT_FILE']));"
        "assert told['messages'][-1]['content'] == 'ok'; assert 'OPENAI_API_KEY' not in os.environ;"
        "print('thinking'); print(json.dumps({'value': float(open('hint.txt').read()),"
        " 'components': {'a': 1}}))"
    )
    program = [sys.executable, "-c", ONE_CALL]
    group = b.group()
    good = HarnessSource(program, [sys.executable, "-c", verifier], workdir="template")
    ref = await made.play(good, b.key(group, 0))
    assert (ref.status, ref.reward) == ("completed", 7.0)
    assert b.attempt(group, 0)["reward_parts"] == {"a": 1.0}
    for sample, script, complaint in (
        (1, "raise SystemExit('no')", "exited with 1: no"),
        (2, "print('good')", "must print a number"),
        (3, "print('NaN')", "must be finite"),
    ):
        bad = HarnessSource(program, [sys.executable, "-c", script])
        kind, message, _ = await failure(made.play(bad, b.key(group, sample)))
        assert kind == "INFRA_ERROR"
        assert complaint in message


async def test_what_the_gateway_could_not_sample_ends_the_program_as_an_infra_error(
    lab: Any, engine: StubEngine
) -> None:
    made = await lab()
    b = made.bench
    engine.logprob = float("nan")
    lines = "\n".join(f"    {line}" for line in ONE_CALL.strip().splitlines())
    stubborn = f"import time\ntry:\n{lines}\nfinally:\n    time.sleep(600)"
    group = b.group()
    began = time.monotonic()
    kind, message, _ = await failure(made.play(python(stubborn), b.key(group, 0)))
    assert time.monotonic() - began < 20
    assert kind == "INFRA_ERROR"
    assert "log-probability nan" in message
    assert b.attempt(group, 0)["policy_tokens"] == 0


@pytest.mark.parametrize("when", ["create", "run", "twice"])
async def test_no_process_of_a_cancelled_attempt_is_left(
    lab: Any, engine: StubEngine, when: str
) -> None:
    made = await lab()
    b = made.bench
    mark = secrets.token_hex(8)
    source = HarnessSource(["bash", str(PROGRAMS / "unruly.sh")], one, env={"MARK": mark})
    group = b.group()
    environment = limited(60)
    playing = asyncio.create_task(made.play(source, b.key(group, 0), environment))
    if when == "create":
        await until(lambda: b.sql("SELECT 1 FROM gateway_keys WHERE run_id = %s", b.run))
    else:
        await until(lambda: len(processes_with(mark)) >= 6)
    cancelled_at = time.monotonic()
    environment.cancel(BY_TEMPORAL)
    if when == "twice":
        await asyncio.sleep(0.3)
        environment.cancel(BY_TEMPORAL)
    with pytest.raises((asyncio.CancelledError, ApplicationError)):
        await playing
    assert processes_with(mark) == []
    assert time.monotonic() - cancelled_at < 5
    row = b.attempt(group, 0)
    assert (row["status"], row["reward"]) == ("cancelled", None)


async def test_what_a_program_leaves_behind_is_gone_before_it_is_judged(
    lab: Any, engine: StubEngine
) -> None:
    made = await lab()
    b = made.bench
    mark = secrets.token_hex(8)
    left: list[Any] = []

    def look(rollout: RolloutView, task: Task) -> float:
        left.extend(processes_with(mark))
        return 1.0

    leaves = (
        ONE_CALL + "\nimport subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"
    )
    source = HarnessSource([sys.executable, "-c", leaves], look, env={"MARK": mark})
    ref = await made.play(source, b.key(b.group(), 0))
    assert (ref.status, left) == ("completed", [])


async def test_the_ledgers_cancel_reaches_a_program_that_never_samples(
    lab: Any, engine: StubEngine
) -> None:
    made = await lab()
    b = made.bench
    mark = secrets.token_hex(8)
    group = b.group()
    source = HarnessSource(["sleep", "600"], one, env={"MARK": mark})
    environment, beats = limited(60), list[Any]()
    environment.on_heartbeat = beats.append
    playing = asyncio.create_task(failure(made.play(source, b.key(group, 0), environment)))
    await until(lambda: processes_with(mark))
    await until(lambda: beats and beats[-1].get("phase") == "program")
    leash = psutil.Process(beats[-1]["process"])  # as people see it in `rollbook inspect`
    assert leash.children(recursive=True) == processes_with(mark)
    b.sql("UPDATE attempts SET cancel_cause = 'stale' WHERE run_id = %s AND sample = 0", b.run)
    kind, message, _ = await playing
    assert (kind, message) == ("CANCELLED", "stale")
    assert processes_with(mark) == []


async def test_a_killed_worker_takes_its_programs_with_it(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    script = (
        "import asyncio\nfrom pathlib import Path\nfrom activities.programs import running\n"
        "async def main():\n"
        f"    async with running(['bash', {str(PROGRAMS / 'unruly.sh')!r}], folder=Path({str(tmp_path)!r}),"
        f" env={{'MARK': {mark!r}}}, output=Path({str(tmp_path / 'out')!r})):\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    root = PROGRAMS.parents[1]
    worker = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    )
    try:
        await until(lambda: len(processes_with(mark)) >= 6)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    await until(lambda: not processes_with(mark), 5)


async def test_a_second_cancel_does_not_tear_the_clean_up(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)

    async def run() -> None:
        async with running(
            ["bash", str(PROGRAMS / "unruly.sh")],
            folder=tmp_path,
            env={"MARK": mark},
            output=tmp_path / "out",
        ):
            await asyncio.sleep(600)

    work = asyncio.create_task(run())
    await until(lambda: len(processes_with(mark)) >= 6)
    for _ in range(3):
        work.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await work
    assert processes_with(mark) == []


class Sampling:
    """A session of the user's own that hands the gateway to a client."""

    gateway = True

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=recorder.base_url, api_key=recorder.api_key) as client:
            said: Any = [{"role": "user", "content": "hello"}]
            await client.chat.completions.create(model="m", messages=said)
        with pytest.raises(ConfigError, match="one writer"):
            await recorder.sample([1, 2])
        return Outcome(Status.COMPLETED, reward=0.5)


async def test_a_session_may_sample_through_the_gateway(lab: Any, engine: StubEngine) -> None:
    made = await lab()
    b = made.bench
    engine.say = Script(made.chat, ["ok"])
    ref = await made.play(Sampling(), b.key(b.group(), 0))
    assert (ref.status, ref.reward, ref.tokens) == ("completed", 0.5, 3)


async def test_a_worker_without_a_gateway_says_so(lab: Any) -> None:
    made = await lab()
    b = made.bench
    made.gate.url = None
    kind, message, _ = await failure(made.play(python("pass"), b.key(b.group(), 0)))
    assert kind == "SOURCE_BROKEN"
    assert "ROLLBOOK_GATEWAY" in message


def test_settings_that_a_harness_cannot_serve_are_refused(make: Make) -> None:
    good = HarnessSource(["true"], one)
    check(good, make().config)
    reserve = make(budget={"final_answer_reserve": 10}).config
    for source, config, named in (
        (good, reserve, "final_answer_reserve"),
        (Sampling(), reserve, "final_answer_reserve"),
        (HarnessSource([], one), make().config, "command"),
        (HarnessSource(["true"], []), make().config, "verify"),
        (HarnessSource(["true"], one, workdir="nowhere"), make().config, "workdir"),
    ):
        with pytest.raises(ConfigError, match=named):
            check(source, config)
