"""The environments a user copies."""

from pathlib import Path
from typing import Any

import pytest

from domain.config import RunConfig
from domain.environments import RolloutView
from domain.rollouts import Reward, Task
from domain.sources import load, resolve
from domain.tools import answer_calls
from storage.datasets import read_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_and_its_source_are_valid(path: Path) -> None:
    config = RunConfig.load(path)
    load(config)


@pytest.mark.parametrize(
    ("text", "value"),
    [("321", 1.0), ("320", 2 / 3), ("32", 1 / 3), ("3214", 0.5), ("", 0.0), ("123", 1 / 3)],
)
def test_reverse3_rewards_right_positions(text: str, value: float) -> None:
    reward = resolve("reverse3:reward", root=EXAMPLES, key="reward")
    assert reward(text, Task("123", {"answer": "321"})) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [(" -4\n", 1.0), ("5 - 9 = -4", 0.5), ("7", 0.1), ("it is 7", 0.0), ("", 0.0)],
)
def test_arithmetic_rewards_the_bare_answer(text: str, value: float) -> None:
    reward = resolve("smollm2_arithmetic:reward", root=EXAMPLES, key="reward")
    assert reward(text, Task("t", {"answer": "-4"})).value == value


def test_arithmetic_problems_come_from_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    train = read_tasks("smollm2_arithmetic:train", root=EXAMPLES)
    assert len(train) == 512
    assert train == read_tasks("smollm2_arithmetic:train", root=EXAMPLES)
    assert train[0].data["answer"].lstrip("-").isdigit()


async def test_the_calculator_calculates_and_refuses() -> None:
    source = resolve("calculator:Calculator", root=EXAMPLES, key="source")()
    (task, *_) = read_tasks("calculator:train", root=EXAMPLES)

    async def answer(expression: str) -> str:
        call = {"name": "calculate", "arguments": {"expression": expression}}
        message = {"tool_calls": [{"id": "call_0", "type": "function", "function": call}]}
        (told,) = (await answer_calls(message, source.tools)).messages
        return str(told["content"])

    assert await answer(task.data["expression"]) == str(task.data["answer"])
    assert await answer("-(2 + 3) * 4") == "-20"
    for refused in ("__import__('os')", "2 ** 99", "1 / 0", "9" * 20, "1 +", "True + 1"):
        assert (await answer(refused)).startswith("error: calculate raised")


async def test_the_calculator_judges_the_last_number() -> None:
    source = resolve("calculator:Calculator", root=EXAMPLES, key="source")()
    task = Task("t", {"expression": "(1 + 2) * 3", "answer": 9})

    def after(text: str, **metrics: float) -> Any:
        return RolloutView(task, [{"role": "assistant", "content": text}], metrics=metrics)

    view = after("3 times 3 is 9.", tool_calls=1.0)
    assert await source.reward(view, task) == Reward(1.2, {"right": 1.0, "called": 1.0})
    view = after("10", tool_calls=1.0, tool_errors=1.0)
    assert await source.reward(view, task) == Reward(0.0, {"right": 0.0, "called": 0.0})
