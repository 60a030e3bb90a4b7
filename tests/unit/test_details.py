"""The table of a group that people see in the Temporal UI."""

from collections import Counter
from datetime import UTC, datetime

from domain.messages import AttemptRef, GroupIn, StuckAttempt
from workflows.details import Told, render

NOW = datetime(2026, 11, 3, 4, 5, 6, tzinfo=UTC)


def table(told: dict[int, Told]) -> list[list[str]]:
    text = render(GROUP, 1, Counter({"stale": 2}), told)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [
        [cell.replace("\N{NO-BREAK SPACE}", " ").strip() for cell in row[1:-1].split("|")]
        for row in rows
    ]


GROUP = GroupIn(
    run="r",
    group=7,
    gen=0,
    batch=0,
    task="t",
    environment="e",
    size=3,
    kept=0,
    samples=((0, 0), (1, 0), (2, 1)),
)


def test_each_sample_has_one_row_with_its_newest_attempt_in_order() -> None:
    ref = AttemptRef(
        sample=2, attempt=1, status="completed", member=True, turns=3, tokens=40, version=0
    )
    stuck = StuckAttempt(
        sample=0, attempt=4, waits_on="tool", why="a|b", since="03 Nov 04:00:00", turn=1, version=5
    )
    told = {2: Told.ended(1, "member", ref, NOW), 0: Told.stuck(stuck), 1: Told.running(0, NOW)}
    head, _, *rows = table(told)
    assert head[-2:] == ["since", "waits on"]
    assert rows == [
        ["s0.a4", "stuck", "1", "0", "v5", "03 Nov 04:00:00", "**tool**: a/b"],
        ["s1.a0", "running", "", "", "", "03 Nov 04:05:06", "see Pending Activities"],
        ["s2.a1", "member", "3", "40", "v0", "03 Nov 04:05:06", ""],
    ]


def test_short_cells_neither_wrap_nor_touch() -> None:
    text = render(GROUP, 0, Counter(), {0: Told.running(0, NOW)})
    (row,) = [line for line in text.splitlines() if line.startswith("| s0")]
    cells = [cell[1:-1] for cell in row[1:-1].split("|")]
    assert all(" " not in cell and cell.endswith("\N{NO-BREAK SPACE}") for cell in cells[:-1])


def test_the_line_above_it_counts_what_was_sampled_again() -> None:
    assert "resubmitted: stale 2" in render(GROUP, 1, Counter({"stale": 2}), {})
    assert "resubmitted: none" in render(GROUP, 1, Counter(), {})
