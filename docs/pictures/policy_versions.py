"""Draws the pictures of docs/policy-versions.md from the ledger of three small real runs.

    python docs/pictures/policy_versions.py --state .rollbook     # trains them first, a few minutes

Nothing is drawn that did not happen: bars are `segments` rows, lines are `policy_versions.served_at`,
holds are `steps.held` events.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook import (
    AsyncTrainer,
    Budget,
    Env,
    GroupCompletion,
    KVCache,
    RolloutEngine,
    RolloutView,
    Task,
    TinyModel,
)
from rollbook.connect import open_ledger
from storage.database import Ledger

HERE = Path(__file__).parent
COLOURS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#c2a900", "#e8743b", "#b5305c", "#7a7a7a")
AGE_COLOURS = ("#a9d3e8", "#4292c6", "#084a91")
STEPS = 7
GROUPS = 10
"""How many of each run are drawn."""
BOUND = 2
SLOW = 4
"""One task in so many takes its time."""


class Wanderer(Env):
    """Turns with pauses; a few tasks are slow: what tool-using agents look like in time."""

    recovery = "stateless"

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        """Pose something."""
        return [{"role": "user", "content": f"{task.data['n']:03d}" * 6 + "="}]

    async def on_turn(self, rollout: RolloutView) -> list[dict[str, Any]] | None:
        """Go on for a while; on a slow task much longer."""
        slow = rollout.task.data["n"] % SLOW == 0
        said = str(rollout.messages[1]["content"])
        if rollout.turns >= (9 if slow else 2) + random.Random(said).randrange(3):
            return None
        await asyncio.sleep(1.6 if slow else 0.4)
        return [{"role": "user", "content": "?="}]

    async def reward(self, rollout: RolloutView, task: Task) -> float:
        """Sevens are good."""
        said = "".join(str(m["content"]) for m in rollout.messages if m["role"] == "assistant")
        return said.count("7") / max(1, len(said))

    async def on_truncated(self, rollout: RolloutView, task: Task, cause: str) -> float:
        """What was said until then counts."""
        return await self.reward(rollout, task)


def trainer(name: str, state: Path) -> AsyncTrainer:
    """One of the three runs."""
    segment = name == "picture-segment"
    mask = name in ("picture-segment", "picture-mask")
    engine = RolloutEngine(
        TinyModel(alphabet="0123456789=?", dim=16, layers=1, heads=2, max_positions=256),
        env=Wanderer(),
        budget=Budget(max_turns=12, max_generated_tokens=200, segment_tokens=8),
        sampling_policy="segment" if segment else "trajectory",
        kv_cache=KVCache(max_staleness=1) if segment else KVCache(),
        sample_timeout=120.0,
    )
    return AsyncTrainer(
        engine=engine,
        optimizer=1e-3,
        completion=GroupCompletion(),
        groups_per_step=2,
        group_size=4,
        max_staleness=BOUND,
        stale_policy="mask_span" if mask else "wait",
        allow_trajectory_loss=mask,
        order="admission" if mask else "deadline",
        truncation="score",
        ahead=2,
        width=256,
        run=name,
        state=state,
    )


@dataclass
class Drawing:
    """Shapes of one picture."""

    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, fill: str, *, title: str = "") -> None:
        """A filled rectangle that says what it is."""
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.8):.1f}" height="{h:.1f}" '
            f'fill="{fill}"><title>{title}</title></rect>'
        )

    def line(self, x: float, y: float, to: float, colour: str) -> None:
        """A vertical line."""
        self.shapes.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{to:.1f}" stroke="{colour}" '
            'stroke-dasharray="3 2"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        colour: str = "#222",
        bold: bool = False,
    ) -> None:
        """Words that begin at a point."""
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{weight}>{words}</text>'
        )

    def save(self, path: Path) -> None:
        """Write the picture."""
        body = "\n".join(self.shapes)
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n'
            '<defs><pattern id="old" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="6" height="6" fill="#eee"/>'
            '<line x1="0" y1="0" x2="0" y2="6" stroke="#999" stroke-width="2"/></pattern></defs>\n'
            f"{body}\n</svg>\n"
        )


def rows(ledger: Ledger, query: str, run: str) -> list[dict[str, Any]]:
    """Rows of a query whose `%(run)s` is the run."""
    with ledger.transaction() as tx:
        return tx.execute(query, {"run": run}).fetchall()


SEGMENTS = """
SELECT s.group_id, s.sample, s.seq, s.tokens, s.version_spans,
    extract(epoch FROM coalesce(lag(s.created_at) OVER w, a.started_at) - r.began)::float8 AS start,
    extract(epoch FROM s.created_at - r.began)::float8 AS stop
FROM segments s JOIN attempts a USING (run_id, group_id, sample, attempt),
    LATERAL (SELECT min(started_at) AS began FROM attempts WHERE run_id = %(run)s) r
WHERE s.run_id = %(run)s AND a.member
WINDOW w AS (PARTITION BY s.group_id, s.sample ORDER BY s.seq)
ORDER BY s.group_id, s.sample, s.seq"""

SERVED = """
SELECT version, extract(epoch FROM served_at - r.began)::float8 AS at FROM policy_versions,
    LATERAL (SELECT min(started_at) AS began FROM attempts WHERE run_id = %(run)s) r
WHERE run_id = %(run)s AND served_at IS NOT NULL ORDER BY version"""

AGES = """
SELECT q.step, t.version_before - v.version AS age, v.version, sum(v.tokens)::int AS tokens
FROM queue q JOIN steps t USING (run_id, step)
JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member
JOIN segments s ON (s.run_id, s.group_id, s.sample, s.attempt)
    = (a.run_id, a.group_id, a.sample, a.attempt)
CROSS JOIN LATERAL (SELECT s.version_spans[i] AS version, s.version_spans[i + 1] AS tokens
    FROM generate_series(1, cardinality(s.version_spans), 2) AS i) v
WHERE q.run_id = %(run)s GROUP BY 1, 2, 3 ORDER BY 1, 2"""

WAITED = """
SELECT t.step, coalesce((t.metrics ->> 'waited/hold')::float8, 0) AS held,
    (SELECT string_agg(e.group_id::text, ', ' ORDER BY e.id) FROM events e
     WHERE (e.run_id, e.step, e.kind) = (t.run_id, t.step, 'steps.held')) AS binding
FROM steps t WHERE t.run_id = %(run)s ORDER BY 1"""


def draw_timelines(ledger: Ledger) -> None:
    """Pinned against per-segment sampling: who sampled what, when, with which version."""
    panels = {
        "picture-wait": (
            'sampling_policy = "trajectory"',
            "a rollout keeps the version it began with, whatever is served meanwhile: one colour",
        ),
        "picture-segment": (
            'sampling_policy = "segment"',
            "each request takes the newest version that the KV bound allows: colours change",
        ),
    }
    left, wide, row = 30, 850, 13
    bars_of = {run: _shown(rows(ledger, SEGMENTS, run)) for run in panels}
    count = max(len({(b["group_id"], b["sample"]) for b in bars}) for bars in bars_of.values())
    drawing = Drawing(left + wide + 30, len(panels) * (count * row + 104) + 40)
    seen = {v for bars in bars_of.values() for b in bars for v in b["version_spans"][::2]}
    drawing.text(
        left, 22, "a bar is a rollout, a cut in it the end of a request; sampled by", size=12
    )
    for n, version in enumerate(sorted(seen)):
        drawing.box(left + 372 + 90 * n, 12, 12, 12, _of_version(version))
        drawing.text(left + 388 + 90 * n, 22, f"version {version}")
    top = 56
    for run, (title, means) in panels.items():
        bars = bars_of[run]
        order = list(dict.fromkeys((b["group_id"], b["sample"]) for b in bars))
        end = max(b["stop"] for b in bars)
        drawing.text(left, top, title, size=15, bold=True)
        drawing.text(left, top + 18, means)
        head, foot = top + 46, top + 52 + len(order) * row
        for served in rows(ledger, SERVED, run):
            if 0 <= served["at"] <= 0.97 * end:
                x = left + wide * served["at"] / end
                drawing.line(x, head - 6, foot, _of_version(served["version"]))
                words, colour = (
                    f"version {served['version']} is served",
                    _of_version(served["version"]),
                )
                beside = x + 3 if x < left + 0.85 * wide else x - 100
                drawing.text(beside, head - 8, words, size=10, colour=colour)
        for bar in bars:
            y = head + 4 + order.index((bar["group_id"], bar["sample"])) * row
            x, w = left + wide * bar["start"] / end, wide * (bar["stop"] - bar["start"]) / end
            for version, share, at in _spans(bar["version_spans"], bar["tokens"]):
                what = f"group {bar['group_id']} sample {bar['sample']}, version {version}"
                cut = 1.0 if w * share > 3 else 0.0
                drawing.box(
                    x + w * at, y, w * share - cut, row - 3, _of_version(version), title=what
                )
        drawing.text(left + wide - 110, foot + 12, f"time: {end:.0f} seconds →", size=11)
        top += count * row + 104
    drawing.save(HERE / "pinned-or-per-segment.svg")


def _of_version(version: int) -> str:
    return COLOURS[version % len(COLOURS)]


def _shown(bars: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two rollouts of each of the first groups, in the order in which they began."""
    groups = list(dict.fromkeys(b["group_id"] for b in bars))[:GROUPS]
    chosen = [b for b in bars if b["group_id"] in groups and b["sample"] < 2]
    began = {
        (b["group_id"], b["sample"]): b["start"]
        for b in sorted(chosen, key=lambda b: -float(b["start"]))
    }
    return sorted(chosen, key=lambda b: (began[b["group_id"], b["sample"]], b["seq"]))


def _spans(spans: Sequence[int], tokens: int) -> Iterator[tuple[int, float, float]]:
    """`(version, share, start)` of a segment's spans."""
    at = 0.0
    for version, count in zip(spans[::2], spans[1::2], strict=True):
        yield version, count / tokens, at
        at += count / tokens


def draw_ages(ledger: Ledger) -> None:
    """Wait against mask: how old the tokens of each step were, and which of them trained."""
    panels = {
        "picture-wait": (
            f'stale_policy = "wait", max_staleness = {BOUND}',
            "every token trains: the trainer holds its update for a group that would grow too old",
        ),
        "picture-mask": (
            f'stale_policy = "mask_span", max_staleness = {BOUND}',
            "the trainer never holds: tokens that have grown too old were sampled for nothing",
        ),
    }
    left, wide, tall = 30, 850, 170
    drawing = Drawing(left + wide + 30, len(panels) * (tall + 134) + 40)
    drawing.text(left, 22, "a bar is the tokens of a step, by how many versions old they are:")
    legend = [
        *((AGE_COLOURS[n], f"{n}") for n in range(BOUND + 1)),
        ("url(#old)", "more: not trained"),
    ]
    for n, (colour, words) in enumerate(legend):
        drawing.box(left + 410 + 44 * n, 12, 12, 12, colour)
        drawing.text(left + 426 + 44 * n, 22, words)
    top = 56
    for run, (title, means) in panels.items():
        ages = rows(ledger, AGES, run)
        steps = rows(ledger, WAITED, run)
        most = max(sum(r["tokens"] for r in ages if r["step"] == s["step"]) for s in steps)
        drawing.text(left, top, title, size=15, bold=True)
        drawing.text(left, top + 18, means)
        base, place = top + 36 + tall, wide / len(steps)
        for at, step in enumerate(steps):
            x, y = left + place * at, base
            trained = False
            for r in (r for r in ages if r["step"] == step["step"]):
                h = tall * r["tokens"] / most
                y -= h
                old = run == "picture-mask" and r["age"] > BOUND
                trained |= not old
                colour = "url(#old)" if old else AGE_COLOURS[min(r["age"], BOUND)]
                what = (
                    f"step {step['step']}: {r['tokens']} tokens of v{r['version']}, age {r['age']}"
                )
                drawing.box(x, y, place - 26, h, colour, title=what)
                if h > 13:
                    ink = "white" if not old and r["age"] else "#222"
                    drawing.text(
                        x + 5, y + 13, f"{r['tokens']} of age {r['age']}", size=11, colour=ink
                    )
            drawing.text(x, base + 15, f"step {step['step']}", size=12)
            if step["binding"] is not None:
                who = step["binding"]
                drawing.text(x, base + 30, f"held {step['held']:.1f} s", size=11, colour="#b5305c")
                drawing.text(x, base + 43, f"for group {who}", size=11, colour="#b5305c")
            if not trained:
                drawing.text(x, base + 30, "no update", size=11, colour="#b5305c")
        top += tall + 134
    drawing.save(HERE / "wait-or-mask.svg")


async def train(state: Path) -> None:
    """The runs, or what is left of them."""
    tasks = [Task(f"{n:03d}", {"n": n}) for n in range(200)]
    for name in ("picture-wait", "picture-segment", "picture-mask"):
        async for step in trainer(name, state).run(tasks, steps=STEPS):
            sys.stdout.write(f"{name}: step {step.n} of {STEPS}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path(".rollbook"))
    folder = parser.parse_args().state
    asyncio.run(train(folder))
    with open_ledger(folder) as opened:
        draw_timelines(opened)
        draw_ages(opened)
