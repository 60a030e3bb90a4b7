"""Drawing tasks, reading data sets, loading sources."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.config import RunConfig
from domain.data import TaskStream, as_tasks
from domain.environments import Env, HarnessSource, PromptSource, task_ids
from domain.errors import ConfigError, DataChanged, SourceBroken
from domain.rollouts import Task
from domain.sources import check, load
from storage.datasets import open_stream, read_tasks


def numbered(count: int) -> list[Task]:
    return [Task(str(i), {"n": i}) for i in range(count)]


def config(**changes: object) -> RunConfig:
    table: dict[str, object] = {
        "name": "r",
        "steps": 1,
        "tasks": {"source": "s:s", "dataset": "d:d"},
        "model": {"tiny": {}},
    }
    return RunConfig.parse(table | changes)


def test_ten_tasks_two_epochs_batch_four_are_exactly_twenty_draws() -> None:
    stream = TaskStream(tasks=numbered(10), batch_size=4, epochs=2, seed=3)
    assert stream.batches == 5
    drawn = [task.id for i in range(stream.batches + 2) for task in stream.batch(i)]
    assert Counter(drawn) == {str(i): 2 for i in range(10)}
    assert sorted(drawn[:10], key=int) == [str(i) for i in range(10)]
    assert drawn[:10] != drawn[10:]


def test_the_last_batch_is_short_and_then_nothing_comes() -> None:
    stream = TaskStream(tasks=numbered(10), batch_size=4, epochs=1)
    assert [len(stream.batch(i)) for i in range(4)] == [4, 4, 2, 0]


def test_without_epochs_the_data_has_no_end() -> None:
    stream = TaskStream(tasks=numbered(3), batch_size=2)
    assert stream.batches is None
    assert len(stream.batch(1_000_000)) == 2


def test_without_shuffle_the_order_is_that_of_the_file() -> None:
    stream = TaskStream(tasks=numbered(3), batch_size=2, epochs=2, shuffle=False)
    assert [t.id for i in range(3) for t in stream.batch(i)] == list("012012")


def test_the_permutation_never_changes() -> None:
    stream = TaskStream(tasks=numbered(10), batch_size=10, seed=7)
    assert [t.id for t in stream.batch(0)] == list("5189043627")


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_every_epoch_draws_every_task_once(n: int, batch: int, epochs: int, seed: int) -> None:
    stream = TaskStream(tasks=numbered(n), batch_size=batch, epochs=epochs, seed=seed)
    assert stream.batches is not None
    drawn = [task.id for i in range(stream.batches) for task in stream.batch(i)]
    for epoch in range(epochs):
        assert {*drawn[epoch * n : (epoch + 1) * n]} == {str(i) for i in range(n)}
    assert len(drawn) == n * epochs


def test_position_counts_epochs_and_rows() -> None:
    stream = TaskStream(tasks=numbered(10), batch_size=4, epochs=2, seed=3)
    position = stream.position(3)
    assert (position["drawn"], position["epoch"], position["row"]) == (12, 1, 2)
    assert stream.position(9)["drawn"] == 20
    stream.verify(json.loads(json.dumps(position)))


def test_a_changed_data_set_or_seed_is_refused_with_its_name() -> None:
    stream = TaskStream(tasks=numbered(10), batch_size=4, epochs=2, seed=3)
    other = TaskStream(tasks=numbered(9), batch_size=4, epochs=2, seed=3)
    with pytest.raises(DataChanged, match="sha256"):
        other.verify(stream.position(1))
    with pytest.raises(DataChanged, match="seed was 3 and is 4"):
        TaskStream(tasks=numbered(10), batch_size=4, seed=4).verify(stream.position(1))


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        TaskStream(tasks=[], batch_size=1)


def write(folder: Path, content: bytes) -> Path:
    (folder / "tasks.jsonl").write_bytes(content)
    return folder


def test_jsonl_rows_become_tasks(tmp_path: Path) -> None:
    rows = '\ufeff{"id": "a", "prompt": "x\u2028y"}\n\n{"prompt": "z", "answer": [1, 2.5, null]}\n'
    folder = write(tmp_path, rows.encode())
    assert read_tasks("tasks.jsonl", root=folder) == [
        Task("a", {"prompt": "x\u2028y"}),
        Task("1", {"prompt": "z", "answer": [1, 2.5, None]}),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": 1}\n{"id": 2\n', "line 2: not JSON"),
        (b'{"id": 1}\n\xff\n', "line 2: not UTF-8"),
        (b'{"id": 1}\n\n{"id": "1"}\n', "line 3: id '1' was used by line 1"),
        (b'{"x": NaN}\n', "line 1: not JSON .NaN is no JSON value"),
        (b"[1]\n", "line 1: a list is no task"),
        (b'{"id": true}\n', "line 1: id True must be"),
        (b'{"id": "a", "x": {"y": ["\\u0000"]}}\n', r"line 1: x\.y\[0\] holds NUL"),
        (b'{"id": "a", "x": "\\ud83d"}\n', "line 1: x holds NUL or a lone surrogate"),
    ],
)
def test_an_unreadable_row_is_refused_with_its_number(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tasks("tasks.jsonl", root=write(tmp_path, content))


def test_a_value_that_is_not_json_is_refused_with_its_row() -> None:
    with pytest.raises(ConfigError, match="data, row 1: x is a set"):
        as_tasks(enumerate([{"x": 1}, {"x": {1}}]), origin="data")
    with pytest.raises(ConfigError, match="row 0: x is inf"):
        as_tasks(enumerate([Task("a", {"x": float("inf")})]), origin="data")


def test_a_data_set_may_be_a_function_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "own_tasks_module.py").write_text('def rows():\n    return [{"prompt": "1"}]\n')
    stream = open_stream(
        config(
            root=str(tmp_path), tasks={"source": "s:s", "dataset": "own_tasks_module:rows"}, seed=5
        )
    )
    assert isinstance(stream, TaskStream)
    assert (stream.tasks, stream.seed) == ([Task("0", {"prompt": "1"})], 5)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("none.jsonl", "cannot read data set .*none.jsonl: No such file"),
        ("word", "neither a .jsonl file nor of the form"),
        ("not_there_at_all:x", "no module 'not_there_at_all'"),
        ("json:nothing", "has no 'nothing'"),
        ("json:__name__", "is a str"),
    ],
)
def test_a_missing_data_set_is_named(tmp_path: Path, dataset: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tasks(dataset, root=tmp_path)


def test_task_ids_name_tasks_by_their_decimal_id() -> None:
    assert [t.id for t in task_ids({"task_id": [3, 14]})] == ["3", "14"]
    for wrong in ({"ids": [1]}, {"task_id": ["a"]}, {"task_id": [True]}):
        with pytest.raises(SourceBroken):
            task_ids(wrong)  # type: ignore[arg-type]


class Silent(Env):
    async def reset(self, task: Task) -> list[dict[str, object]]:
        return []

    async def reward(self, rollout: object, task: Task) -> float:
        return 0.0


def test_sources_that_cannot_serve_the_settings_are_refused() -> None:
    check(Silent(), config())
    with pytest.raises(ConfigError, match="implement reset, reward"):
        check(Env(), config())
    with pytest.raises(ConfigError, match=r"implement Silent.on_truncated"):
        check(Silent(), config(trainer={"truncation": "score"}))
    with pytest.raises(ConfigError, match=r"implement Silent.on_truncated"):
        check(Silent(), config(trainer={"truncation_by_cause": {"turns": "drop"}}))
    with pytest.raises(ConfigError, match="list of words"):
        check(HarnessSource([], ["y"]), config())
    with pytest.raises(ConfigError, match=r"tasks\.source gives a int"):
        check(1, config())
    snapshotting = Silent()
    snapshotting.recovery = "snapshot"
    with pytest.raises(ConfigError, match="implement snapshot, restore"):
        check(snapshotting, config())


def test_the_examples_load() -> None:
    root = Path(__file__).parents[2] / "examples"
    c = RunConfig.load(root / "reverse3.toml")
    assert isinstance(load(c), PromptSource)
    stream = open_stream(c)
    assert len(stream.tasks) == 744
    held_out = read_tasks("reverse3:held_out", root=root)
    assert len(held_out) == 256
    assert not {t.id for t in held_out} & {t.id for t in stream.tasks}
