"""What people and programs get to read."""

import json
import logging
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from domain.risks import acknowledged
from rollbook import output
from rollbook.commands import runs
from tests.unit.test_config import KEEP, config


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.25, "0.250"),
        (Decimal("0.76562500000000000000"), "0.766"),
        (1e-5, "1.0e-05"),
        (-2e-4, "-2.0e-04"),
        (0.0, "0.000"),
        (41209.4, "41209"),
        (True, "True"),
        (None, "–"),
        (b"\x01\xff", "01ff"),
        ({"a": Decimal("0.5")}, '{"a": 0.5}'),
    ],
)
def test_a_cell_is_short_and_hides_no_small_number(value: object, shown: str) -> None:
    assert output.show(value) == shown


def test_programs_get_numbers_as_numbers() -> None:
    assert json.loads(json.dumps({"mean": Decimal("0.5")}, default=output.plain)) == {"mean": 0.5}


@pytest.mark.parametrize("json_", [True, False])
def test_what_a_run_may_cost_is_said_before_its_first_step(
    json_: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stack: Any = None  # of the services nothing is said here
    monkeypatch.setattr(runs, "facts", lambda stack: {})
    monkeypatch.setattr(runs, "show_stack", lambda stack, *, json: None)
    risky = config(schedule=KEEP)
    runs._say_start(stack, risky, "begins", Path("state"), json=json_)
    said = capsys.readouterr().out
    (risk,) = acknowledged(risky)
    assert json.loads(said)["risks"] == [risk] if json_ else risk in " ".join(said.split())


@pytest.fixture
def log_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("log_as_before")
def test_ranks_that_share_a_log_say_which_one_writes(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (None, "1"):
        for json_lines in (False, True):
            output.log_to_stderr(logging.INFO, json=json_lines, rank=rank)
            logging.getLogger("some.part").info("done")
    text, lines, text_of_rank, lines_of_rank = capsys.readouterr().err.splitlines()
    assert text.endswith("INFO    some.part: done")
    assert "rank" not in json.loads(lines)
    assert text_of_rank.endswith("INFO    rank 1 some.part: done")
    assert json.loads(lines_of_rank)["rank"] == "1"
