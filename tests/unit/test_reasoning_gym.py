"""Data sets of the real reasoning-gym as tasks, scored by the data set that made them."""

from pathlib import Path
from typing import Any

import pytest

from domain import sources
from domain.config import RunConfig
from domain.environments import PromptSource
from domain.errors import ConfigError
from domain.rollouts import Task
from storage.datasets import open_stream, read_tasks

pytest.importorskip("reasoning_gym", reason="make test-ecosystem")


def config(source: str, **args: Any) -> RunConfig:
    table = {
        "name": "gym",
        "steps": 1,
        "model": {"tiny": {}},
        "tasks": {"source": source, "args": args, "batch_size": 2},
    }
    return RunConfig.parse(table)


def reward(source: object, text: str, task: Task) -> float:
    assert isinstance(source, PromptSource)
    value = source.reward(text, task)
    assert isinstance(value, float)
    return value


# countdown keeps lists, number_format floats, sudoku tuples, family_relationships enums
@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "sudoku", "number_format", "family_relationships"]
)
def test_an_answer_earns_what_its_data_set_gives(name: str) -> None:
    made = config(f"reasoning_gym:{name}", size=4, seed=7)
    source, stream = sources.load(made), open_stream(made)
    assert len(stream.tasks) == 4
    for task in stream.tasks:
        told = task.data["answer"]
        assert reward(source, f"well, <answer>{told}</answer>", task) == 1.0
        assert reward(source, str(told), task) == 1.0  # without the tag, the whole reply
        assert reward(source, "<answer>no idea</answer>", task) < 1.0


def test_a_task_is_scored_by_its_own_arguments_not_the_sources() -> None:
    source = sources.load(config("reasoning_gym:chain_sum", size=4, seed=1))
    root = Path()
    held_out = read_tasks("reasoning_gym:chain_sum", {"size": 3, "seed": 2}, root=root)
    assert len(held_out) == 3
    for task in held_out:
        assert reward(source, str(task.data["answer"]), task) == 1.0


def test_rows_are_the_same_in_every_process_without_a_seed() -> None:
    first = open_stream(config("reasoning_gym:chain_sum", size=2))
    assert [t.data for t in first.tasks] == [
        t.data for t in open_stream(config("reasoning_gym:chain_sum", size=2)).tasks
    ]


@pytest.mark.parametrize(
    ("args", "first"),
    [
        ({}, None),
        ({"system_prompt": "Be brief."}, "Be brief."),
        ({"system_prompt": "direct"}, "dir"),
    ],
)
def test_the_system_prompt_is_asked_for(args: dict[str, Any], first: str | None) -> None:
    task = open_stream(config("reasoning_gym:chain_sum", size=1, **args)).tasks[0]
    roles = [message["role"] for message in task.data["prompt"]]
    assert roles == (["system", "user"] if first else ["user"])
    if first == "dir":  # the name of one of the package's own
        assert "between <answer> and </answer> tags" in task.data["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("reasoning_gym:chain_summ", {}, "no data set 'chain_summ'; it has chain_sum"),
        ("reasoning_gym:chain_sum", {"min_terms": 5, "max_terms": 2}, "chain_sum refuses"),
        ("reasoning_gym:chain_sum", {"term": 5}, "chain_sum refuses"),
        ("reasoning_gym:chain_sum", {"system_prompt": 5}, "must be text"),
    ],
)
def test_what_it_does_not_have_is_named(source: str, args: dict[str, Any], message: str) -> None:
    made = config(source, **args)
    with pytest.raises(ConfigError, match=message):
        open_stream(made)
