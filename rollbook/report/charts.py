"""Small charts as inline SVG: lines, stacked bars. Every mark has a text that the page shows on hover."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 520, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26

Points = Sequence[tuple[float, float]]

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c755f")
"""For series, told apart also by people who see no red or no green."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def card(title: str, note: str, body: str, *, wide: bool = False) -> str:
    """A chart with its title and one sentence on how to read it."""
    kind = "card wide" if wide else "card"
    return (
        f'<figure class="{kind}"><figcaption><b>{escape(title)}</b> {escape(note)}</figcaption>'
        f"{body}</figure>"
    )


def lines(series: Mapping[str, Points], *, unit: str = "", x_name: str = "step") -> str:
    """Lines over a common axis; one hover text for each x with all values there."""
    known = {name: list(points) for name, points in series.items() if len(points)}
    if not known:
        return nothing()
    xs = sorted({x for points in known.values() for x, _ in points})
    values = [y for points in known.values() for _, y in points]
    x, y = _axes(xs, values)
    parts = [_grid(x, y, xs, unit)]
    for points, colour in zip(known.values(), _cycle(len(known)), strict=True):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" class="line" style="stroke:{colour}"/>')
        if len(points) < 60:
            parts += [
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.6" style="fill:{colour}"/>'
                for a, b in points
            ]
    at = {name: dict(points) for name, points in known.items()}
    for value in xs:
        told = [f"{name} {shown(at[name][value])}{unit}" for name in known if value in at[name]]
        parts.append(_strip(x, xs, value, [f"{x_name} {shown(value)}", *told]))
    return _svg(parts) + legend(dict(zip(known, _cycle(len(known)), strict=True)))


def stacked(xs: Sequence[float], series: Mapping[str, Sequence[float]], *, unit: str = "") -> str:
    """Stacked bars, one an x; series that are zero throughout are left out."""
    known = {name: values for name, values in series.items() if any(values)}
    if not known or not len(xs):
        return nothing()
    totals = [sum(values[i] for values in known.values()) for i in range(len(xs))]
    x, y = _axes([min(xs) - 0.5, max(xs) + 0.5], [0.0, *totals])
    width = max(1.0, (x(1) - x(0)) * 0.8)
    colours = dict(zip(known, _cycle(len(known)), strict=True))
    parts = [_grid(x, y, xs, unit)]
    for i, at in enumerate(xs):
        base = 0.0
        for name, values in known.items():
            if values[i] <= 0:
                continue
            top, bottom = y(base + values[i]), y(base)
            parts.append(
                f'<rect x="{x(at) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.2f}" style="fill:{colours[name]}"/>'
            )
            base += values[i]
        told = [f"{name} {shown(values[i])}{unit}" for name, values in known.items() if values[i]]
        parts.append(_strip(x, xs, at, [f"step {shown(at)}", *told]))
    return _svg(parts) + legend(colours)


def legend(colours: Mapping[str, str]) -> str:
    """Names beside their colours."""
    items = [
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def nothing() -> str:
    """In place of a chart without data."""
    return '<p class="none">nothing was recorded</p>'


def shown(value: float) -> str:
    """A number in few characters."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values from low to high."""
    span = (high - low) or 1.0
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def tip(told: Sequence[str]) -> str:
    """The attribute that the page's script shows on hover."""
    return f'data-tip="{escape(chr(10).join(told), quote=True)}"'


def _axes(xs: Sequence[float], values: Sequence[float]) -> tuple[Scale, Scale]:
    low, high = min(0.0, *values), max(values)
    if low == high:
        high = low + 1.0
    return (
        Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT),
        Scale(low, high + (high - low) * 0.05, HEIGHT - BOTTOM, TOP),
    )


def _grid(x: Scale, y: Scale, xs: Sequence[float], unit: str) -> str:
    parts = []
    for value in ticks(y.low, y.high):
        at = y(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        )
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 3.5:.1f}" class="tick end">{shown(value)}{escape(unit)}</text>'
        )
    parts += [
        f'<text x="{x(value):.1f}" y="{HEIGHT - 8}" class="tick mid">{shown(value)}</text>'
        for value in ticks(min(xs), max(xs), 8)
        if float(value).is_integer()
    ]
    return "".join(parts)


def _strip(x: Scale, xs: Sequence[float], at: float, told: Sequence[str]) -> str:
    """An invisible column over one x, to be hovered."""
    width = (WIDTH - LEFT - RIGHT) / max(1, len(xs))
    return (
        f'<rect x="{x(at) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}" class="hover" {tip(told)}/>'
    )


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
