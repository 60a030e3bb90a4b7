"""What a person sees while a run goes on: a live panel on a terminal, a line per step elsewhere."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from domain.config import RunConfig
from rollbook.output import print_json, show
from rollbook.stack.supervise import Report, State
from storage import reports
from storage.database import Ledger, Tx

Row = dict[str, Any]

# Column of the step table -> metric of the step record.
COLUMNS = {
    "reward": "reward/mean",
    "loss": "loss/pg",
    "lag": "lag/mean",
    "length": "length/mean",
    "tok/s": "tokens_per_second",
    "waited s": "waited",
}
_BARS = " ▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 8


class Progress:
    """Follows one run through the ledger; `refresh` is called now and then."""

    def __init__(self, config: RunConfig, ledger: Ledger, console: Console, *, json: bool) -> None:
        """Follow `config.name` from the ledger's present state on."""
        self._config = config
        self._ledger = ledger
        self._console = console
        self._json = json
        self._steps: list[Row] = []
        self._last = -1
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._json:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def refresh(self, processes: Sequence[Report]) -> None:
        """Read what is new in the ledger and show it."""

        def read(tx: Tx) -> tuple[list[Row], Row | None, Row | None]:
            name = self._config.name
            return (
                reports.steps(tx, name, after=self._last),
                reports.waiting(tx, name),
                reports.balance(tx, name),
            )

        fresh, waiting, balance = self._ledger.call(read)
        self._steps += fresh
        if fresh:
            self._last = fresh[-1]["step"]
        if self._live is not None:
            self._live.update(self._panel(waiting, balance, processes))
            return
        for step in fresh:
            if self._json:
                print_json(step)
            else:
                self._console.print(step_line(step, self._config.steps), highlight=False)

    def _panel(
        self, waiting: Row | None, balance: Row | None, processes: Sequence[Report]
    ) -> Panel:
        table = Table(expand=True, header_style="bold", box=None)
        for column in ("step", "version", "groups", *COLUMNS):
            table.add_column(column, justify="right")
        for step in self._steps[-_SHOWN_STEPS:]:
            metrics = step["metrics"] or {}
            cells = [step["step"], step["version"], step["groups"]]
            cells += [metrics.get(name) for name in COLUMNS.values()]
            table.add_row(*(show(cell) for cell in cells))
        rewards = [
            value
            for step in self._steps
            if (value := (step["metrics"] or {}).get("reward/mean")) is not None
        ]
        lines: list[Any] = [table]
        if rewards:
            lines.append(Text(f"reward  {sparkline(rewards)}  {rewards[-1]:.3f}", style="green"))
        if waiting:
            lines.append(Text(waiting_line(waiting), style="cyan"))
        if balance:
            shown = ("drawn", "registered", "submitted", "queue", "trained", "abandoned", "expired")
            lines.append(Text("groups  " + "  ".join(f"{k} {balance[k]}" for k in shown)))
        lines.append(Text("  ".join(process_word(report) for report in processes), style="dim"))
        done = f"step {self._last + 1} of {self._config.steps or '?'}"
        return Panel(Group(*lines), title=f"rollbook · {self._config.name} · {done}")


def step_line(step: Mapping[str, Any], steps: int | None) -> str:
    """One applied step as a line of text."""
    metrics = step["metrics"] or {}
    facts = [f"{k} {show(metrics[name])}" for k, name in COLUMNS.items() if name in metrics]
    head = f"step {step['step']}" + (f"/{steps}" if steps else "")
    tail = "" if step["updated"] else f"  no update: {step['cause']}"
    return f"{head}  v{step['version']}  groups {step['groups']}  " + "  ".join(facts) + tail


def waiting_line(waiting: Mapping[str, Any]) -> str:
    """What the run waits for, in words."""
    parts = [
        f"served v{show(waiting['served'])}",
        f"{waiting['ready']} groups ready",
        f"{waiting['running']} sampling",
    ]
    if waiting["publish_due"]:
        parts.append("publishing")
    if waiting["publish_held_by"]:
        parts.append(f"publish held by {waiting['publish_held_by']}")
    if waiting["binding_group"] is not None:
        parts.append(
            f"held by group {waiting['binding_group']} (due at v{waiting['binding_deadline']}) "
            f"since {waiting['held_since']:%H:%M:%S}"
        )
    return "now     " + " · ".join(parts)


def process_word(report: Report) -> str:
    """A process and, unless it is well, its state."""
    word = report.name if report.state is State.READY else f"{report.name}: {report.state}"
    return f"{word} ({report.restarts} restarts)" if report.restarts else word


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values between 0 and their maximum as bars, averaged down to `width` characters."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(*means, 1e-9) if len(means) > 1 else max(means[0], 1e-9)
    return "".join(_BARS[max(0, min(8, round(8 * value / top)))] for value in means)
