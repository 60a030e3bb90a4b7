"""An environment of the real verifiers package, sampled through the gateway and judged by its rewards.

verifiers needs an older `openai` than the other programs of the tests, hence `make test-ecosystem`.
"""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="make test-ecosystem")

from temporalio.exceptions import ApplicationError

from activities.attempt import Attempts
from activities.chat import Chat
from activities.inference import EngineClient
from activities.routing import Router
from activities.sampler import Sampler
from activities.setups import Setup
from domain import sources
from domain.config import RunConfig
from domain.environments import samples_at_gateway
from domain.errors import ConfigError
from storage import segments
from storage.datasets import open_stream
from tests.attempted import limited
from tests.gateways import Script, gateway
from tests.stub_engine import StubEngine

PROGRAMS = Path(__file__).parents[2] / "programs"
ENVIRONMENT = "verifiers:vf-arithmetic"
AGENT = {"harness": {"id": "vf-arithmetic"}, "runtime": {"type": "subprocess"}}
pytestmark = pytest.mark.filterwarnings("default")  # of a package that is not ours


def config(**args: Any) -> RunConfig:
    table = {
        "name": "vf",
        "steps": 1,
        "model": {"tiny": {}},
        "root": str(PROGRAMS),
        "tasks": {"source": ENVIRONMENT, "args": {"agent": AGENT} | args, "batch_size": 2},
    }
    return RunConfig.parse(table)


class Knows:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    async def get(self, run: str, environment: str) -> Setup:
        return self.setup


Play = Callable[..., Any]


@pytest.fixture
async def play(
    sampled_run: Callable[..., Any], printable_chat: Chat, engine: StubEngine
) -> AsyncIterator[Play]:
    """Plays one attempt whose task is the environment's first, as a worker would."""
    engines = EngineClient()

    async def make(says: list[str], **budget: int) -> tuple[Any, Any, int]:
        b = sampled_run(budget=budget)
        engine.say = Script(printable_chat, says)
        source = sources.load(config())
        async with gateway(b, printable_chat) as gate:
            sampler = Sampler(b.ledger, engines, Router(b.ledger))
            knows = Knows(Setup(config=b.config, source=source, chat=printable_chat))
            attempts = Attempts(sampler, knows, worker="w", gateway=gate.url)  # type: ignore[arg-type]
            group = b.group(task=open_stream(config()).tasks[0].data)
            return await limited(60).run(attempts.run_attempt, b.key(group, 0)), b, group

    yield make
    await engines.aclose()


def test_its_tasks_are_its_tasksets() -> None:
    made = config(taskset={"rows": 5})
    tasks = open_stream(made).tasks
    assert [task.id for task in tasks] == ["0", "1", "2", "3", "4"]
    assert tasks[2].data["task"]["prompt"] == "2+1="
    assert samples_at_gateway(sources.load(made))


async def test_its_rewards_judge_what_the_gateway_recorded(play: Play) -> None:
    ref, b, group = await play(["12", "1"])
    assert (ref.status, ref.reward, ref.turns) == ("completed", 1.5, 2)
    read = b.ledger.call(segments.read, b.run, group, 0, 0)
    assert len(read) == 2
    parts = b.one("SELECT reward_parts FROM attempts WHERE run_id = %s AND member", b.run)
    assert parts["reward_parts"] == {"right": 1.0, "brief": 0.5}
    places = b.ledger.call(segments.places, b.run, group, 0, 0)
    assert [p.chain for p in places] == [0, 0]  # one chain: the ids of the first turn were kept


def test_what_cannot_be_loaded_is_named() -> None:
    table = config().model_dump()
    table["tasks"] |= {"source": "verifiers:nowhere"}
    with pytest.raises(ConfigError, match="verifiers cannot load 'nowhere'"):
        sources.load(RunConfig.parse(table))
    with pytest.raises(ConfigError, match="cannot load 'vf-arithmetic'"):
        sources.load(config(taskset={"lines": 5}))


async def test_a_used_up_budget_truncates_the_episode(play: Play) -> None:
    ref, b, _ = await play(["12"], max_turns=1)
    assert (ref.status, ref.reward) == ("truncated", None)
    assert b.one("SELECT truncation FROM attempts WHERE run_id = %s AND member", b.run) == {
        "truncation": "turns"
    }


async def test_an_episode_that_failed_is_sampled_again(play: Play) -> None:
    with pytest.raises(ApplicationError, match="HarnessError") as failed:
        await play(["12", "I give up"])
    assert failed.value.type == "INFRA_ERROR"
