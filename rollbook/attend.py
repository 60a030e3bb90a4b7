"""One run on this machine, from the start of its processes to its end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from domain import sources
from domain.config import RunConfig
from domain.environments import samples_at_gateway
from domain.errors import ConfigError, RollbookError
from domain.services import Services
from rollbook import evaluation
from rollbook.launch import REFUSED, TRAINER, Job
from rollbook.output import command, console, print_event, say
from rollbook.progress import Progress
from rollbook.stack.child import Report
from rollbook.stack.child import State as ProcessState
from storage import evaluations
from storage import runs as ledger_runs
from storage.database import Ledger
from storage.runs import Run

_POLL_S = 0.5
_QUESTION = '"SELECT * FROM reward_by_version ORDER BY version"'
_ENDS = 5
"""Steps averaged at either end for the summary."""


def attend(
    ledger: Ledger,
    config: RunConfig,
    services: Services,
    state: Path,
    *,
    force: bool = False,
    json: bool = False,
) -> int:
    """Run the processes until the trainer's end, show progress, evaluate, say how it ended.

    The first SIGINT or SIGTERM has the trainer save its work and close the run, the second ends it
    at once.

    Args:
        ledger: of the run.
        config: the run's.
        services: addresses.
        state: folder of the local stack.
        force: take the run from a trainer that holds it.
        json: print events instead of text.

    Returns:
        The exit code: 1 if the run failed.

    Raises:
        RollbookError: a process broke too often; the end of its log is in the text.
        ConfigError: a process refused what it was given.
    """
    began = time.monotonic()
    before = ledger.call(ledger_runs.read, config.name).next_step - 1
    gateway = any(map(samples_at_gateway, sources.load_all(config).values()))
    links = {} if services.temporal_ui is None else {"Temporal UI": services.temporal_ui}
    links["status"] = command("status", config.name, state=state)
    with (
        _stop_signals() as stops,
        Job(config, services, state, force=force, gateway=gateway) as job,
        Progress(config, ledger, console, json=json, after=before, links=links) as progress,
    ):
        ended, why = _follow(job, progress, stops)
        lost = job.supervisor.describe(TRAINER) if ended.state is ProcessState.FAILED else None
    found = ledger.call(ledger_runs.read, config.name)
    if found.state == "finished" and not stops:
        _evaluate(ledger, found, services, state, json=json)
    _say_end(found, progress.steps, time.monotonic() - began, state, json=json)
    if why is not None:
        raise RollbookError(f"run {found.id} was stopped, because a process broke: {why}")
    if lost is not None and found.state in ("creating", "running", "paused"):
        kind = ConfigError if ended.exit_code == REFUSED else RollbookError
        raise kind(f"the trainer of run {found.id} broke: {lost}")
    return 1 if found.state == "failed" else 0


def _follow(job: Job, progress: Progress, stops: list[int]) -> tuple[Report, str | None]:
    """The trainer's last report, and what else broke and made it stop."""
    why: str | None = None
    asked = killed = False
    while (ended := job.trainer_ended()) is None:
        progress.refresh(job.supervisor.reports())
        why = why or job.broken()
        if (stops or why) and not asked:
            asked = True
            again = "" if why else " (Ctrl-C again ends it at once)"
            progress.note(f"closing the run: the trainer saves its work{again}")
            threading.Thread(target=job.stop_trainer, name="stop", daemon=True).start()
        if len(stops) > 1 and not killed:
            killed = True
            threading.Thread(target=job.kill_trainer, name="kill", daemon=True).start()
        time.sleep(_POLL_S)
    progress.refresh(job.supervisor.reports())
    return ended, why


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM within the block."""
    received: list[int] = []
    both = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(n, lambda number, _: received.append(number)) for n in both]
    try:
        yield received
    finally:
        for number, handler in zip(both, previous, strict=True):
            signal.signal(number, handler)


def _evaluate(ledger: Ledger, run: Run, services: Services, state: Path, *, json: bool) -> None:
    """What [evaluation] asks for and training left no time for; tells the results of all."""
    wanted = run.config.evaluation
    if wanted is None:
        return
    due = ledger.call(evaluations.due, run.id, wanted.dataset, every=wanted.every)

    if due:
        evaluation.evaluate(ledger, services, run.config, state, due, tell=lambda _: None)
    for row in ledger.call(evaluations.summary, run.id, wanted.dataset):
        if json:
            print_event("evaluation", **row)
        else:
            say(evaluation.describe(wanted, row))


def _say_end(
    run: Run, steps: list[dict[str, Any]], seconds: float, state: Path, *, json: bool
) -> None:
    """How the run ended, and where to look."""
    if json:
        print_event("end", run=run.id, state=run.state, step=run.next_step, failure=run.failure)
        return
    rewards = [r for s in steps if (r := (s["metrics"] or {}).get("reward/mean")) is not None]
    text = f"\nrun {run.id} is {run.state} at step {run.next_step}, after {seconds:.0f} s"
    if len(rewards) >= 2 * _ENDS:
        first, last = (sum(part) / _ENDS for part in (rewards[:_ENDS], rewards[-_ENDS:]))
        text += f"; mean reward of the first {_ENDS} steps {first:.3f}, of the last {last:.3f}"
    say(text, style="bold")
    if run.failure:
        say(run.failure, style="red")
    if run.state != "finished":
        say(f"  go on            {command('resume', run.id, state=state)}")
    say(f"  where it stands  {command('status', run.id, state=state)}")
    say(f"  ask in SQL       {command('sql', _QUESTION, state=state)}")
    say(f"  Temporal UI      {command('up', state=state)}  (and open the address it prints)")
