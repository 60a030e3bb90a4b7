"""A mix draws each environment by its ratio, in an order that nothing but its settings decides."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.config import RunConfig
from domain.data import TaskStream
from domain.errors import ConfigError, DataChanged
from domain.mixing import MixedStream, Part
from domain.rollouts import Task
from storage.datasets import open_stream


def stream(name: str, tasks: int, *, seed: int = 0) -> TaskStream:
    return TaskStream(
        tasks=[Task(str(n), {"of": name}) for n in range(tasks)], batch_size=4, seed=seed
    )


def mixed(*ratios: int, tasks: int = 5, batch_size: int = 4, seed: int = 0) -> MixedStream:
    names = "abcdef"
    parts = [Part(names[n], r, stream(names[n], tasks, seed=seed)) for n, r in enumerate(ratios)]
    return MixedStream(parts=parts, batch_size=batch_size)


def names(stream: MixedStream, batches: int) -> str:
    return "".join(task.id[0] for index in range(batches) for task in stream.batch(index))


def test_draws_are_spread_as_evenly_as_whole_tasks_allow() -> None:
    assert names(mixed(3, 1), 2) == "aabaaaba"
    assert names(mixed(1, 1), 1) == "abab"
    assert names(mixed(2, 1, 1), 2) == "abcaabca"


@given(ratios=st.lists(st.integers(1, 7), min_size=1, max_size=5), size=st.integers(1, 9))
@settings(deadline=None)
def test_any_window_of_a_whole_cycle_has_the_ratio(ratios: list[int], size: int) -> None:
    m = mixed(*ratios, batch_size=size)
    cycle = sum(ratios)
    drawn = names(m, -(-3 * cycle // size))
    for first in range(len(drawn) - cycle + 1):
        counts = Counter(drawn[first : first + cycle])
        assert [counts["abcdef"[n]] for n in range(len(ratios))] == ratios


@given(ratios=st.lists(st.integers(1, 4), min_size=1, max_size=4), size=st.integers(1, 7))
@settings(deadline=None)
def test_each_environment_goes_through_its_own_epochs(ratios: list[int], size: int) -> None:
    m = mixed(*ratios, batch_size=size, tasks=3)
    tasks = [task.id for index in range(40) for task in m.batch(index)]
    for part in m.parts:
        own = [task.partition("/")[2] for task in tasks if task.startswith(part.environment)]
        assert own == [part.stream.draw(n).id for n in range(len(own))]
        position = m.position(40)["mix"][part.environment]
        assert (position["drawn"], position["epoch"]) == (len(own), len(own) // 3)


def test_a_batch_is_the_same_whatever_was_drawn_before() -> None:
    once = mixed(2, 3)
    for index in range(6):
        once.batch(index)
    assert once.batch(3) == mixed(2, 3).batch(3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixed(3, 2), "ratio was 2 and is 3"),
        (mixed(2, 3, tasks=6), "sha256"),
        (mixed(2, 3, seed=1), "seed was 0 and is 1"),
        (mixed(2, 3, 1), "the mix changed"),
        (mixed(2, 3, batch_size=5), "batch_size was 4 and is 5"),
    ],
)
def test_another_mix_is_not_gone_on_with(other: MixedStream, message: str) -> None:
    position = mixed(2, 3).position(7)
    mixed(2, 3).verify(position)
    with pytest.raises(DataChanged, match=message):
        other.verify(position)


def config(root: Path, **tasks: object) -> RunConfig:
    table = {
        "name": "mix",
        "steps": 1,
        "model": {"tiny": {}},
        "root": str(root),
        "tasks": {"batch_size": 4, **tasks},
    }
    return RunConfig.parse(table)


SUMS = {"environment": "sums", "source": "reasoning_gym:chain_sum", "args": {"size": 3}, "ratio": 3}
OWN = {"environment": "own", "source": "s:s", "dataset": "own.jsonl"}


def test_a_mix_is_seen_by_each_worker_as_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"id": "x", "n": 1}\n')
    (tmp_path / "sums.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    made = config(tmp_path, mix=[SUMS | {"dataset": "sums.jsonl", "args": {}}, OWN])
    drawn = [task.id for task in open_stream(made).batch(0)]
    assert sorted(drawn) == ["own/x", "sums/0", "sums/1", "sums/2"]
    assert made.environments == ("sums", "own")
    assert [made.environment_of(task) for task in ("own/x", "sums/0")] == ["own", "sums"]
    alone = made.of("sums")
    assert (alone.tasks.source, alone.tasks.environment) == ("reasoning_gym:chain_sum", "sums")
    with pytest.raises(ConfigError, match="no environment 'other'; it has sums, own"):
        made.of("other")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "tasks.source is missing"),
        ({"source": "s:s"}, "tasks.dataset is missing"),
        ({"mix": [SUMS], "source": "s:s"}, "each environment of a mix has its own"),
        ({"mix": [SUMS, SUMS]}, "one environment twice"),
        ({"mix": [SUMS], "epochs": 2}, "epochs = 2 has no meaning in a mix"),
        ({"mix": [OWN | {"dataset": ""}]}, "tasks.mix of 'own': dataset is missing"),
        ({"mix": [OWN | {"environment": "a/b"}]}, "environment"),
    ],
)
def test_what_a_mix_must_name(tmp_path: Path, tasks: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **tasks)
