"""`status`, `inspect` and `sql`: reading the ledger."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psycopg
import typer
from rich.live import Live

from activities import waits
from domain.errors import ConfigError
from domain.waits import Wait
from rollbook.connect import STATE, Looking, is_up, open_ledger, open_looking
from rollbook.output import (
    command,
    console,
    print_event,
    print_facts,
    print_json,
    print_table,
    say,
    table_of,
)
from rollbook.progress import Progress
from storage import reports
from storage import runs as ledger_runs
from storage.database import Ledger, Tx

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
State = Annotated[Path, typer.Option(help="Folder of the local stack.")]
_ALIVE = ("creating", "running", "paused")
_POLL_S = 1.0

Run = Annotated[str, typer.Argument(help="Name of the run.")]

Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(status)
    app.command()(inspect)
    app.command()(sql)


def status(
    run: Annotated[str | None, typer.Argument(help="Name of the run; default: all.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow it live until it ends, or Ctrl-C.")
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Where runs stand, and what a run waits for.

    Example: `rollbook status reverse3`
    """
    if watch and not is_up(state):
        raise ConfigError(
            f"nothing runs in {state}, so there is nothing to watch; leave --watch out to see how "
            "things stand"
        )
    with open_ledger(state) as ledger:
        if watch:
            _watch(ledger, run, state, json)
        elif run is None:
            _show_runs(ledger, json)
        else:
            _show_run(ledger, run, state, json)


def _watch(ledger: Ledger, run: str | None, state: Path, json: bool) -> None:
    """Until the run ends."""
    if run is None:
        _watch_runs(ledger, json)
    found = ledger.call(ledger_runs.read, run)
    links = {"look closer": command("inspect", run, state=state)}
    with Progress(found.config, ledger, console, json=json, links=links) as progress:
        while ledger.call(ledger_runs.read, run).state in _ALIVE:
            progress.refresh()
            time.sleep(_POLL_S)
        progress.refresh()
    if not json:
        say(f"run {run} is {ledger.call(ledger_runs.read, run).state}")


def _watch_runs(ledger: Ledger, json: bool) -> NoReturn:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            rows = ledger.call(reports.runs)
            if json:
                print_event("runs", runs=rows)
            elif rows:
                live.update(table_of(rows, title="runs"), refresh=True)
            time.sleep(_POLL_S)


def _show_runs(ledger: Ledger, json: bool) -> None:
    rows = ledger.call(reports.runs)
    if json:
        print_json(rows)
    else:
        print_table(rows, title="runs", empty="none yet; start one with `rollbook run CONFIG.toml`")


def _show_run(ledger: Ledger, run: str, state: Path, json: bool) -> None:
    def read(tx: Tx) -> dict[str, Any]:
        found = ledger_runs.read(tx, run)
        steps = reports.steps(tx, run, after=found.next_step - 2)
        return {
            "run": run,
            "state": found.state,
            "failure": found.failure,
            "step": found.next_step,
            "of": found.config.steps,
            "version": found.version,
            "durable_step": found.durable_step,
            "trainer": reports.trainer(tx, run),
            "waiting": reports.waiting(tx, run),
            "balance": reports.balance(tx, run),
            "resubmissions": reports.resubmissions(tx, run),
            "last_step": steps[-1] if steps else None,
            "violations": reports.violations(tx),
        }

    facts = ledger.call(read)
    if json:
        print_json(facts)
        return
    head = {k: facts[k] for k in ("state", "failure", "step", "of", "version", "durable_step")}
    head["trainer"] = facts["trainer"]["holder"]
    print_facts({k: v for k, v in head.items() if v is not None}, title=f"run {run}")
    if facts["state"] in _ALIVE and not facts["trainer"]["lease_left"]:
        say(
            f"no trainer is at work; `{command('resume', run, state=state)}` goes on",
            style="yellow",
        )
    for row in facts["waiting"]:
        share = f" (share {row['share']})" if len(facts["waiting"]) > 1 else ""
        print_facts(row, title=f"waiting{share}")
    if facts["balance"]:
        print_facts(facts["balance"], title="balance")
    if facts["last_step"]:
        print_facts(dict(sorted((facts["last_step"]["metrics"] or {}).items())), title="last step")
    print_table(facts["resubmissions"], title="resubmitted", empty="nothing")
    print_table(facts["violations"], title="ledger violations", empty="none")


def inspect(
    run: Run,
    group: Annotated[int | None, typer.Argument(help="Group id.")] = None,
    state: State = STATE,
    json: Json = False,
) -> None:
    """The data state of a run, or every attempt and event of one group.

    Of a group: per sample its attempts, what each does, for how long, with how many tokens, and when
    its worker was last heard.

    Example: `rollbook inspect reverse3 42`
    """
    if group is None:
        with open_ledger(state) as ledger:
            document = ledger.call(_inspect_run, run)
    else:
        with open_looking(state) as looking:
            document = looking.ledger.call(_inspect_group, run, group)
            document["samples"] = _samples(
                document.pop("attempts"), asyncio.run(_live(looking, run, group))
            )
    if json:
        print_json(document)
        return
    for title, part in document.items():
        if isinstance(part, dict):
            print_facts(part, title=title)
        else:
            print_table(part, title=title, empty="none")


async def _live(looking: Looking, run: str, group: int) -> list[Wait]:
    """What the live attempts of a group do, by their last heartbeats."""
    client = await looking.temporal()
    return await waits.of_attempts(client, looking.ledger, run, silent_s=0.0, group=group)


def _samples(attempts: Sequence[Row], live: Sequence[Wait]) -> list[Row]:
    """One line an attempt: where it is, for how long, with what so far."""
    doing = {(wait.sample, wait.attempt): wait for wait in live}
    lines = []
    for row in attempts:
        wait = doing.get((row["sample"], row["attempt"]))
        why = row["resubmitted_as"] or row["cancel_cause"] or row["truncation"]
        lines.append(
            {
                "sample": row["sample"],
                "attempt": row["attempt"],
                "state": row["status"] or row["state"],
                "phase": (wait.phase or wait.on) if wait else ("member" if row["member"] else why),
                "seconds": row["seconds"],
                "tokens": row["policy_tokens"],
                "turns": row["turns"],
                "version": row["oldest_version"]
                if row["oldest_version"] is not None
                else row["pinned_version"],
                "reward": row["reward"],
                "last heartbeat": None
                if wait is None or wait.heartbeat_s is None
                else f"{wait.heartbeat_s:.1f} s ago",
                "waits for": f"{wait.on}: {wait.detail}" if wait else row["error"],
            }
        )
    return lines


def _inspect_run(tx: Tx, run: str) -> dict[str, Any]:
    found = ledger_runs.read(tx, run)
    order = {
        "permutation": "by seed, per epoch" if found.config.tasks.shuffle else "data order",
        "seed": found.config.seed,
        "epochs": found.config.tasks.epochs,
        "batch_size": found.config.tasks.batch_size,
    }
    return {
        "data order": order,
        "cursor": reports.data(tx, run),
        "balance": reports.balance(tx, run) or {},
        "owed": reports.owed(tx, run),
    }


def _inspect_group(tx: Tx, run: str, group: int) -> dict[str, Any]:
    ledger_runs.read(tx, run)
    found = reports.group(tx, run, group)
    if found is None:
        raise ConfigError(f"run {run!r} has no group {group}; `rollbook inspect {run}` lists some")
    return {
        "group": found,
        "attempts": reports.attempts(tx, run, group),
        "timeline": reports.timeline(tx, run, group),
    }


def sql(
    query: Annotated[str, typer.Argument(help="One SQL statement; it runs read-only.")],
    state: State = STATE,
    json: Json = False,
) -> None:
    """Ask the ledger in SQL (schema `ledger`), read-only.

    Example: `rollbook sql "SELECT * FROM balance"`
    """

    def ask(tx: Tx) -> list[dict[str, Any]]:
        tx.execute("SET TRANSACTION READ ONLY")
        # bytes: the user's own text, on purpose; prepared: one statement, so no COMMIT gets in
        try:
            cursor = tx.execute(query.encode(), prepare=True)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise ConfigError(f"Postgres refuses the statement: {str(error).strip()}") from error

    with open_ledger(state) as ledger:
        rows = ledger.call(ask)
    if json:
        print_json(rows)
    else:
        print_table(rows, title="answer", empty="no rows")
