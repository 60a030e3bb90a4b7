"""The table of a group's members that people see in the Temporal UI, as Markdown.

The UI gives a table's cells no padding and breaks their lines at every space, so the short cells are
held together, and apart, by unbreakable spaces; only the last one, which says what for, wraps.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from domain.ids import attempt_activity_id
from domain.messages import SINCE, AttemptRef, GroupIn, StuckAttempt

_HEAD = ("attempt", "status", "turns", "tokens", "version", "since")


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is known of a sample's newest attempt."""

    attempt: int
    status: str
    since: str
    turns: int | None = None
    tokens: int | None = None
    version: int | None = None
    waits: str = ""

    @staticmethod
    def running(attempt: int, now: datetime) -> "Told":
        """It has just been scheduled; from here on its heartbeats tell."""
        return Told(
            attempt=attempt,
            status="running",
            since=f"{now:{SINCE}}",
            waits="see Pending Activities",
        )

    @staticmethod
    def stuck(told: StuckAttempt) -> "Told":
        """The steward saw no progress."""
        return Told(
            attempt=told.attempt,
            status="stuck",
            since=told.since,
            turns=told.turn,
            tokens=told.tokens,
            version=told.version,
            waits=f"**{told.waits_on}**: {told.why}",
        )

    @staticmethod
    def ended(attempt: int, status: str, ref: AttemptRef | None, now: datetime) -> "Told":
        """It has ended, with a reference if the ledger has one."""
        return Told(
            attempt=attempt,
            status=status,
            since=f"{now:{SINCE}}",
            turns=None if ref is None else ref.turns,
            tokens=None if ref is None else ref.tokens,
            version=None if ref is None else ref.version,
        )


def render(
    group: GroupIn, members: int, resubmitted: Counter[str], told: Mapping[int, Told]
) -> str:
    """The group in a line, its samples in a table, and where the ledger tells the same."""
    causes = ", ".join(f"{cause} {n}" for cause, n in sorted(resubmitted.items()))
    lines = [
        f"**{members} of {group.size} members** · group {group.group} of run {group.run}"
        f" · generation {group.gen} · kept {group.kept} · resubmitted: {causes or 'none'}",
        "",
        _row(_HEAD, "waits on"),
        "|---" * (len(_HEAD) + 1) + "|",
        *(_row(_cells(sample, row), row.waits) for sample, row in sorted(told.items())),
        "",
        f"`rollbook inspect {group.run} {group.group}` tells the same from the ledger.",
    ]
    return "\n".join(lines)


def _cells(sample: int, row: Told) -> tuple[str, ...]:
    version = None if row.version is None else f"v{row.version}"
    name = attempt_activity_id(sample, row.attempt)
    cells = (name, row.status, row.turns, row.tokens, version, row.since)
    return tuple("" if cell is None else str(cell) for cell in cells)


def _row(cells: tuple[str, ...], waits: str) -> str:
    held = (f"{cell} ".replace(" ", "\N{NO-BREAK SPACE}") for cell in cells)
    return f"| {' | '.join((*held, waits.replace('|', '/')))} |"
