"""What the tests of one attempt share: sources, a worker, an environment of Temporal's."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from activities.attempt import Attempts
from activities.chat import Chat, PlainChat
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain.environments import Env, Outcome, Recorder, RolloutView, Source
from domain.messages import AttemptIn, AttemptRef
from domain.rollouts import Status, Task
from domain.tools import Message
from tests.stub_engine import STOP

Make = Callable[..., Any]


Run = Callable[[Task, Recorder], Awaitable[Outcome]]


BY_TEMPORAL = ActivityCancellationDetails(cancel_requested=True)


def chat() -> Chat:
    words = {f"w{n}": n for n in range(200)}
    return PlainChat(Tokenizer(WordLevel(words, unk_token="w0")), frozenset({STOP}))


class Session:
    """A SessionSource made of a function."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        return await self._run(task, recorder)


@dataclass
class One:
    """The setups of a worker that knows one run."""

    setup: Setup

    async def get(self, run: str, environment: str) -> Setup:
        return self.setup


def limited(seconds: float) -> ActivityEnvironment:
    environment = ActivityEnvironment()
    now = datetime.now(UTC)
    environment.info = replace(
        environment.info,
        scheduled_time=now,
        started_time=now,
        start_to_close_timeout=timedelta(seconds=60),
        schedule_to_close_timeout=timedelta(seconds=seconds),
    )
    return environment


@dataclass
class Worker:
    """A worker process's parts, around the bench's run."""

    bench: Any
    engines: EngineClient
    source: Source

    def attempts(self) -> Attempts:
        b = self.bench
        sampler = Sampler(b.ledger, self.engines, Router(b.ledger))
        setups = One(Setup(config=b.config, source=self.source, chat=chat()))
        return Attempts(sampler, setups, worker="w1")  # type: ignore[arg-type]

    async def play(
        self, i: AttemptIn, environment: ActivityEnvironment | None = None
    ) -> AttemptRef:
        environment = environment or limited(60)
        result: AttemptRef = await environment.run(self.attempts().run_attempt, i)
        return result


def with_engines(b: Any, *urls: str, version: int = 0) -> None:
    """Register live engines that hold a version."""
    for url in urls:
        b.sql(
            """INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
            VALUES (%s, %s, 1, 4, now() + interval '1 hour') ON CONFLICT DO NOTHING""",
            b.run,
            url,
        )
        b.sql(
            """INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256)
            VALUES (%s, %s, %s, 1, %s)""",
            b.run,
            url,
            version,
            bytes(32),
        )


async def failure(play: Awaitable[Any]) -> tuple[str, str, bool]:
    with pytest.raises(ApplicationError) as caught:
        await play
    return str(caught.value.type), caught.value.message, caught.value.non_retryable


async def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


class Slow(Env):
    """Takes its time in a tool, and computes its verdict in Python without ever waiting."""

    async def reset(self, task: Task) -> list[Message]:
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        await asyncio.sleep(SLOW_S)
        return None

    def reward(self, rollout: RolloutView, task: Task) -> float:  # type: ignore[override]
        give_up = time.monotonic() + SLOW_S
        while time.monotonic() < give_up:
            sum(range(10_000))
        return 1.0


SLOW_S = 2.5


async def sample_once(task: Task, recorder: Recorder) -> Outcome:
    await recorder.sample([5])
    return Outcome(Status.COMPLETED, reward=1.0)


async def boom(task: Task, recorder: Recorder) -> Outcome:
    await recorder.sample([5])
    raise RuntimeError("tool call k")


async def no_reward(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.COMPLETED)


async def nan_reward(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.COMPLETED, reward=float("nan"))


async def gives_up(task: Task, recorder: Recorder) -> Outcome:
    return Outcome(Status.CANCELLED, detail="no sandbox")


async def broken(task: Task, recorder: Recorder) -> Outcome:
    return "done"  # type: ignore[return-value]


class Counting(Env):
    """Three turns; every hook is counted, so that a resume shows what ran again."""

    def __init__(self, recovery: Any) -> None:
        self.recovery = recovery
        self.calls: list[str] = []
        self.turns_seen: list[int] = []

    async def reset(self, task: Task) -> list[Message]:
        self.calls.append("reset")
        return [{"role": "user", "content": "w5"}]

    async def on_turn(self, rollout: RolloutView) -> list[Message] | None:
        self.calls.append(f"turn{rollout.turns}")
        return None if rollout.turns == 3 else [{"role": "user", "content": "w6"}]

    async def snapshot(self, rollout: RolloutView) -> Any:
        return {"turns": rollout.turns}

    async def restore(self, rollout: RolloutView, state: Any) -> None:
        self.calls.append(f"restore{state['turns']}")

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        return float(rollout.turns)


SEGMENT: dict[str, Any] = {
    "sampling": {"policy": "segment", "kv_cache": {"max_staleness": 1}},
    "schedule": {"order": "deadline", "stale_policy": "resubmit", "max_lag": 4},
}
