"""What people and programs get to read."""

import json
from decimal import Decimal

import pytest

from rollbook import output


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
