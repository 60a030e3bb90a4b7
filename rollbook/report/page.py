"""The report page: what its charts show, and the HTML around them."""

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

from rollbook.report import charts, timeline
from storage import reports
from storage import runs as ledger_runs
from storage.database import Tx

Row = dict[str, Any]

SHOWN_ROLLOUTS = 1200
"""Bars of the timeline; of a longer run the newest."""

WAITS = ("groups", "hold", "publish", "resident_limit", "storage", "paused")

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#667085;--line:#e4e7ec;--card:#fff;--page:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#98a2b3;--line:#2c3440;--card:#171c24;--page:#0e1217}}
*{box-sizing:border-box}body{margin:0;padding:28px;background:var(--page);color:var(--ink);
font:14px/1.45 system-ui,"DejaVu Sans",sans-serif}h1{font-size:22px;margin:0 0 4px}header p{margin:0;color:var(--soft)}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin:18px 0}.facts div{background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:8px 14px}.facts b{display:block;font-size:18px}.facts span{color:var(--soft);font-size:12px}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:14px}.wide{grid-column:1/-1}
.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
figcaption{color:var(--soft);margin-bottom:6px}figcaption b{color:var(--ink);margin-right:6px}svg{width:100%;height:auto;display:block}
.grid{stroke:var(--line)}.tick{font-size:11px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.hover{fill:transparent}.hover:hover{fill:var(--ink);fill-opacity:.06}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12px;color:var(--soft)}.legend i{display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:5px}.queued{stroke:var(--soft);stroke-opacity:.5}.step{stroke:var(--ink);stroke-opacity:.25;stroke-dasharray:3 3}
.step-mark{fill:var(--ink)}.version{font-size:11px;fill:#fff;text-anchor:middle;dominant-baseline:middle;paint-order:stroke;
stroke:#0007;stroke-width:2px}.none{color:var(--soft)}table{border-collapse:collapse;font-size:13px}td,th{padding:3px 14px 3px 0;
text-align:left;border-bottom:1px solid var(--line)}#tip{position:fixed;pointer-events:none;white-space:pre;background:#111c;color:#fff;
padding:6px 9px;border-radius:6px;font-size:12px;display:none;z-index:9}
"""

SCRIPT = """
const tip=document.getElementById('tip');
document.addEventListener('mousemove',e=>{const mark=e.target.closest('[data-tip]');
if(!mark){tip.style.display='none';return}
tip.textContent=mark.dataset.tip;tip.style.display='block';
const right=e.clientX+14+tip.offsetWidth>innerWidth;
tip.style.left=(right?e.clientX-14-tip.offsetWidth:e.clientX+14)+'px';
tip.style.top=Math.min(e.clientY+14,innerHeight-tip.offsetHeight-6)+'px'});
"""


def render(tx: Tx, run: str) -> str:
    """The whole page, self-contained: no script, style or font of anybody else.

    Raises:
        RunNotFound: no such run.
    """
    found = ledger_runs.read(tx, run)
    steps = reports.steps(tx, run, limit=100_000)
    times = reports.step_times(tx, run)
    balance = reports.balance(tx, run) or {}
    rollouts = reports.rollout_spans(tx, run, limit=SHOWN_ROLLOUTS)
    since = rollouts[0]["submitted_at"] if rollouts else datetime.now().astimezone()
    facts = {
        "state": found.state,
        "step": f"{found.next_step} of {found.config.steps or '?'}",
        "version": found.version,
        "groups trained": balance.get("trained", 0),
        "abandoned": balance.get("abandoned", 0),
        "reward": _last(steps, "reward/mean"),
        "seconds a step": _median([row["seconds"] for row in times]),
    }
    body = [
        charts.card("Reward", "of the trained rollouts", _metric(steps, {"mean": "reward/mean"})),
        charts.card(
            "Lag", "groups by versions between sampling and training", _lags(tx, run, times)
        ),
        charts.card("Status", "shares of the rollouts trained", _shares(steps)),
        charts.card("Waiting", "where the seconds of a step go", _waiting(times)),
        charts.card("Lengths", "sampled tokens of a trained rollout", _lengths(tx, run)),
        charts.card("Throughput", "sampled tokens a second, by step", _throughput(steps, times)),
        charts.card(
            "Mismatch",
            "engine against trainer",
            _metric(steps, {"KL": "mismatch/kl", "drift at lag 0": "drift/mean"}),
        ),
        charts.card(
            "Update",
            "gradient norm and clipped share",
            _metric(steps, {"gradient norm": "grad_norm", "clipped": "pg_clipfrac"}),
        ),
        charts.card(
            "Timeline",
            "each bar a rollout: thin queued, thick running, coloured by version; pale ones were not "
            "trained. Dashed lines are steps",
            timeline.draw(
                rollouts,
                reports.served_spans(tx, run),
                [row for row in times if row["applied_at"] and row["applied_at"] >= since],
            ),
            wide=True,
        ),
        charts.card("Failures", "by task", _table(reports.failures(tx, run)), wide=True),
        charts.card("Sampled in vain", "by cause", _table(reports.wasted(tx, run)), wide=True),
    ]
    return _page(run, found.failure, facts, body)


def _page(run: str, failure: str | None, facts: Row, body: Sequence[str]) -> str:
    shown = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(_fact(value))}</b></div>"
        for name, value in facts.items()
        if value is not None
    )
    why = f"<p>{escape(failure)}</p>" if failure else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(run)} · rollbook</title><style>{STYLE}</style>"
        f"<header><h1>{escape(run)}</h1><p>rollbook report</p>{why}</header>"
        f'<div class="facts">{shown}</div><main>{"".join(body)}</main><div id="tip"></div>'
        f"<script>{SCRIPT}</script></html>"
    )


def _fact(value: object) -> str:
    return charts.shown(value) if isinstance(value, float) else str(value)


def _last(steps: Sequence[Row], name: str) -> float | None:
    values = [row["metrics"][name] for row in steps if name in (row["metrics"] or {})]
    return float(values[-1]) if values else None


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _points(rows: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
    # What JSON lacks, infinities and NaN, is stored as text: no point to draw.
    return [(float(x), float(y)) for x, y in rows if isinstance(y, int | float)]


def _metric(steps: Sequence[Row], names: dict[str, str]) -> str:
    return charts.lines(
        {
            label: _points([(row["step"], (row["metrics"] or {}).get(name)) for row in steps])
            for label, name in names.items()
        }
    )


def _shares(steps: Sequence[Row]) -> str:
    names = sorted({n for row in steps for n in row["metrics"] or {} if n.startswith("status/")})
    return charts.stacked(
        [row["step"] for row in steps],
        {
            name.removeprefix("status/"): [
                float((row["metrics"] or {}).get(name, 0)) for row in steps
            ]
            for name in names
        },
    )


def _lags(tx: Tx, run: str, times: Sequence[Row]) -> str:
    counted = {(row["step"], row["lag"]): row["groups"] for row in reports.lags(tx, run)}
    xs = [row["step"] for row in times]
    lags = sorted({lag for _, lag in counted})
    return charts.stacked(
        xs, {f"lag {lag}": [float(counted.get((x, lag), 0)) for x in xs] for lag in lags}
    )


def _waiting(times: Sequence[Row]) -> str:
    done = [row for row in times if row["seconds"] is not None]
    series = {"compute": [row["compute_s"] or 0.0 for row in done]}
    for kind in WAITS:
        series[f"wait: {kind}"] = [row[f"waited_{kind}_s"] or 0.0 for row in done]
    return charts.stacked([row["step"] for row in done], series, unit=" s")


def _lengths(tx: Tx, run: str) -> str:
    rows = reports.lengths(tx, run)
    return charts.lines(
        {
            name: [(float(row["step"]), float(row[name])) for row in rows]
            for name in ("median", "p90", "max")
        }
    )


def _throughput(steps: Sequence[Row], times: Sequence[Row]) -> str:
    seconds = {row["step"]: row["seconds"] for row in times}

    def rate(row: Row) -> float | None:
        tokens, took = (row["metrics"] or {}).get("tokens/sampled"), seconds.get(row["step"])
        return tokens / took if tokens and took else None

    return charts.lines(
        {"sampled tokens": _points([(row["step"], rate(row)) for row in steps])}, unit="/s"
    )


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return '<p class="none">none</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = "".join(
        "<tr>"
        + "".join(f"<td>{escape(str(v if v is not None else '–'))}</td>" for v in row.values())
        for row in rows
    )
    return f"<table><tr>{head}</tr>{lines}</table>"
