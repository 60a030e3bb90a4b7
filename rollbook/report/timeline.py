"""Rollouts against versions and steps: who ran when, under which version, and when it was trained.

One bar a rollout, in the first lane that is free: thin while it was queued, thick while it ran, in
the colour of the version it sampled under. Above: when each version was served. Vertical lines: steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollbook.report import charts
from rollbook.report.charts import Scale, shown, tip

WIDTH, LEFT, RIGHT = 1080, 14, 14
BAND, LANE, TOP = 16, 5, 44
GAP_S = 0.002
"""Share of the shown time that two bars of a lane are apart."""

Row = dict[str, Any]

_VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (200, 215, 40))


@dataclass(frozen=True, slots=True)
class _Bar:
    lane: int
    row: Row


def draw(rollouts: Sequence[Row], versions: Sequence[Row], steps: Sequence[Row]) -> str:
    """The timeline as SVG.

    Args:
        rollouts: `reports.rollout_spans`, in the order of their submission.
        versions: `version`, `served_at`, `until`; in order.
        steps: `step`, `applied_at`.
    """
    if not rollouts:
        return charts.nothing()
    began = min(row["submitted_at"] for row in rollouts)
    end = max(row["finished_at"] or row["now"] for row in rollouts)
    end = max([end, *(row["applied_at"] for row in steps if row["applied_at"])])
    x = Scale(0.0, max((end - began).total_seconds(), 1e-3), LEFT, WIDTH - RIGHT)
    sampled = [row["version"] or 0 for row in rollouts]
    span = (min(sampled), max(sampled))
    bars = _lanes(rollouts, began, (x.high - x.low) * GAP_S)
    height = TOP + (1 + max(bar.lane for bar in bars)) * LANE + 24
    parts = [_version(row, x, began, end, span) for row in versions if row["served_at"]]
    parts += [_step(row, x, began, height) for row in steps if row["applied_at"]]
    parts += [_bar(bar, x, began, span) for bar in bars]
    for second in charts.ticks(0.0, x.high, 10):
        parts.append(
            f'<text x="{x(second):.1f}" y="{height - 6}" class="tick mid">{shown(second)} s</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" class="timeline">{"".join(parts)}</svg>'


def colour(version: int | None, sampled: tuple[int, int]) -> str:
    """The colour of a version, between the oldest and the newest sampled: dark is old, light is new."""
    if version is None:
        return "#999"
    oldest, newest = sampled
    age = (version - oldest) / max(1, newest - oldest)
    place = min(1.0, max(0.0, age)) * (len(_VIRIDIS) - 1)
    i = min(int(place), len(_VIRIDIS) - 2)
    mixed = (
        round(a + (b - a) * (place - i)) for a, b in zip(_VIRIDIS[i], _VIRIDIS[i + 1], strict=True)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _lanes(rollouts: Sequence[Row], began: datetime, gap: float) -> list[_Bar]:
    """Each rollout in the first lane whose last one has ended."""
    free: list[float] = []
    bars = []
    for row in rollouts:
        start = (row["submitted_at"] - began).total_seconds()
        end = ((row["finished_at"] or row["now"]) - began).total_seconds()
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = end + gap
        bars.append(_Bar(lane, row))
    return bars


def _bar(bar: _Bar, x: Scale, began: datetime, sampled: tuple[int, int]) -> str:
    row = bar.row
    y = TOP + bar.lane * LANE
    queued = x((row["submitted_at"] - began).total_seconds())
    started = row["started_at"] or row["finished_at"] or row["now"]
    start = x((started - began).total_seconds())
    end = x(((row["finished_at"] or row["now"]) - began).total_seconds())
    seconds = ((row["finished_at"] or row["now"]) - started).total_seconds()
    told = [
        f"group {row['group_id']} · sample {row['sample']} · attempt {row['attempt']} · task {row['task_id']}",
        f"{row['status'] or row['state']}{_reward(row)} · {row['policy_tokens']} tokens · v{row['version']}",
        f"queued {(started - row['submitted_at']).total_seconds():.2f} s, ran {seconds:.2f} s",
        _fate(row),
    ]
    fate = "" if row["step"] is not None else ' opacity="0.45"'
    thick = (
        f'<rect x="{start:.1f}" y="{y}" width="{max(1.5, end - start):.1f}" height="{LANE - 1}" '
        f'rx="1"{fate} style="fill:{colour(row["version"], sampled)}" {tip(told)}/>'
    )
    thin = f'<line x1="{queued:.1f}" x2="{start:.1f}" y1="{y + 2}" y2="{y + 2}" class="queued"/>'
    return thin + thick


def _reward(row: Row) -> str:
    return "" if row["reward"] is None else f" · reward {row['reward']:.3g}"


def _fate(row: Row) -> str:
    if row["step"] is not None:
        return f"trained in step {row['step']} at lag {row['lag']}"
    return f"not trained: {row['cause'] or row['place']}"


def _version(row: Row, x: Scale, began: datetime, end: datetime, sampled: tuple[int, int]) -> str:
    start = x(max(0.0, (row["served_at"] - began).total_seconds()))
    until = x(((row["until"] or end) - began).total_seconds())
    if until <= LEFT:
        return ""
    told = [f"version {row['version']}", f"served for {(until - start) / (x(1) - x(0)):.1f} s"]
    label = (
        f'<text x="{(start + until) / 2:.1f}" y="{14 + BAND / 2}" class="version">v{row["version"]}</text>'
        if until - start > 22
        else ""
    )
    fill = colour(row["version"], sampled)
    return (
        f'<rect x="{start:.1f}" y="10" width="{max(1.0, until - start):.1f}" height="{BAND}" '
        f'style="fill:{fill}" {tip(told)}/>{label}'
    )


def _step(row: Row, x: Scale, began: datetime, height: int) -> str:
    at = x((row["applied_at"] - began).total_seconds())
    told = [f"step {row['step']} applied", f"{row['groups']} groups"]
    return (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="30" y2="{height - 20}" class="step"/>'
        f'<path d="M{at - 4:.1f} 30h8l-4 7z" class="step-mark" {tip(told)}/>'
    )
