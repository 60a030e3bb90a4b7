"""What a person sees while a run goes on: a live panel on a terminal, a line per step elsewhere."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import psycopg
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from domain.config import RunConfig
from rollbook.output import print_event, show
from rollbook.stack.child import Report, State
from storage import reports
from storage.database import Ledger, Tx

Row = dict[str, Any]

COLUMNS = {
    "reward": "reward/mean",
    "loss": "loss",
    "lag": "lag/mean",
    "length": "length/admitted",
    "kl": "mismatch/kl",
    "tok/s": "tokens_per_second",
}
"""Column of the step table -> metric of the step record."""

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 8


class Progress:
    """Follows one run through the ledger; `refresh` is called now and then."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        console: Console,
        *,
        json: bool,
        after: int = -1,
        links: Mapping[str, str] = {},
    ) -> None:
        """Follow a run.

        Args:
            config: the run's.
            ledger: where it is read.
            console: where it is shown.
            json: print events for programs instead.
            after: steps up to this one are not told again; the panel shows them.
            links: where else to look, for the panel's last lines.
        """
        self.steps: list[Row] = []
        self._config = config
        self._ledger = ledger
        self._console = console
        self._json = json
        self._told = after
        self._links = links
        self._away = False
        self._live: Live | None = None
        self._began: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._json:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Something that is no step."""
        if self._json:
            print_event("note", text=text)
        else:
            self._console.print(text, style="yellow", markup=False, highlight=False)

    def refresh(self, processes: Sequence[Report] = ()) -> None:
        """Read what is new in the ledger and show it; one that is away is told of, once."""
        last = self.steps[-1]["step"] if self.steps else -1

        def read(tx: Tx) -> tuple[list[Row], list[Row], Row | None]:
            name = self._config.name
            return (
                reports.steps(tx, name, after=last),
                reports.waiting(tx, name),
                reports.balance(tx, name),
            )

        try:
            with self._ledger.transaction() as tx:  # no patience: it is read again in a moment
                fresh, waiting, balance = read(tx)
        except psycopg.OperationalError as error:
            if not self._away:
                self.note(f"the ledger does not answer, the run waits for it: {error}")
            self._away = True
            return
        self._away = False
        self.steps += fresh
        if self._began is None and self.steps:
            self._began = time.monotonic(), self.steps[-1]["step"]
        if self._live is not None:
            self._live.update(self.panel(waiting, balance, processes))
            return
        for step in fresh:
            if step["step"] <= self._told:
                continue
            if self._json:
                print_event("step", **step)
            else:
                line = step_line(step, self._config.steps)
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def panel(
        self, waiting: Sequence[Row], balance: Row | None, processes: Sequence[Report]
    ) -> RenderableType:
        """The run at a glance."""
        lines: list[RenderableType] = [self._bar(), Text(), self._table()]
        if rewards := self._rewards():
            line = Text("\nreward   ", style="green")
            line.append(sparkline(rewards))
            line.append(f"  {rewards[0]:.3f} → {rewards[-1]:.3f}")
            lines.append(line)
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim")
        facts.add_column()
        if waiting:
            facts.add_row("now", Text(waiting_line(waiting), style="cyan"))
        if balance:
            shown = ("drawn", "registered", "submitted", "queue", "trained", "abandoned", "expired")
            facts.add_row("groups", "  ".join(f"{k} {balance[k]}" for k in shown if balance[k]))
        if processes:
            words = "  ".join(process_word(report) for report in processes)
            facts.add_row("processes", Text(words))
        for what, where in self._links.items():
            facts.add_row(what, Text(where))
        lines.append(facts)
        title = f"[bold]rollbook[/bold] · {self._config.name}"
        return Panel(Group(*lines), title=title, title_align="left", border_style="dim")

    def _rewards(self) -> list[float]:
        found = ((step["metrics"] or {}).get("reward/mean") for step in self.steps)
        return [reward for reward in found if reward is not None]

    def _bar(self) -> RenderableType:
        done = self.steps[-1]["step"] + 1 if self.steps else 0
        target = self._config.steps
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        if target is None:
            grid.add_row(f"step {done}", "", "")
        else:
            bar = ProgressBar(total=target, completed=done)
            grid.add_row(f"step {done} of {target}", bar, self._remaining(done, target))
        return grid

    def _remaining(self, done: int, target: int) -> str:
        if self._began is None:
            return "starting"
        since, first = self._began
        here = done - 1 - first
        if here < 1:
            return ""
        left = round((time.monotonic() - since) / here * (target - done))
        return f"{left // 60}:{left % 60:02} left"

    def _table(self) -> Table:
        table = Table(expand=True, header_style="bold", box=None, pad_edge=False)
        for column in ("step", "version", "groups", *COLUMNS, "waited s"):
            table.add_column(column, justify="right")
        for step in self.steps[-_SHOWN_STEPS:]:
            table.add_row(
                *(show(step[name]) for name in ("step", "version", "groups")),
                *(show_metric(name, step["metrics"] or {}) for name in COLUMNS.values()),
                f"{waited(step['metrics'] or {}):.1f}",
                style=None if step["updated"] else "dim",
            )
        return table


def waited(metrics: Mapping[str, Any]) -> float:
    """Seconds for which the trainer had nothing to do before the step."""
    return sum(float(s) for name, s in metrics.items() if name.startswith("waited/"))


def show_metric(name: str, metrics: Mapping[str, Any]) -> str:
    """A metric's value for people."""
    value = metrics.get(name)
    if name == "tokens_per_second" and value is not None:
        return f"{value:.0f}"
    return show(value)


def step_line(step: Mapping[str, Any], steps: int | None) -> str:
    """One applied step as a line of text."""
    metrics = step["metrics"] or {}
    facts = [f"{k} {show_metric(name, metrics)}" for k, name in COLUMNS.items() if name in metrics]
    done = f"[{step['step'] + 1}/{steps}] " if steps else ""
    head = f"{done}step {step['step']}"
    tail = "" if step["updated"] else f"  no update: {step['cause']}"
    waiting = f"  waited {waited(metrics):.1f} s"
    return (
        f"{head}  v{step['version']}  groups {step['groups']}  " + "  ".join(facts) + waiting + tail
    )


def waiting_line(shares: Sequence[Mapping[str, Any]]) -> str:
    """What the run waits for, of what each of its shares does, in words."""
    run = shares[0]
    ready, running = (" + ".join(str(each[key]) for each in shares) for key in ("ready", "running"))
    parts = [f"served v{show(run['served'])}", f"{ready} groups ready", f"{running} sampling"]
    if run["state"] not in ("running", "creating"):
        parts.insert(0, str(run["state"]))
    if run["publish_due"]:
        parts.append("publishing")
    if run["publish_held_by"]:
        parts.append(f"publish held by {run['publish_held_by']}")
    parts += [
        f"held by group {each['binding_group']} (due at v{each['binding_deadline']}) "
        f"since {each['held_since']:%H:%M:%S}"
        for each in shares
        if each["binding_group"] is not None
    ]
    return " · ".join(parts)


def process_word(report: Report) -> str:
    """A process and, unless it is well, its state."""
    word = report.name if report.state is State.READY else f"{report.name}: {report.state}"
    return f"{word} ({report.restarts} restarts)" if report.restarts else word


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """The values between 0 and their maximum as bars, averaged down to `width` characters."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = max(*means, 1e-9) if len(means) > 1 else max(means[0], 1e-9)
    return "".join(_BARS[max(0, min(7, round(7 * value / top)))] for value in means)
