"""`evaluate`: held-out results of a run's versions."""

import os
from pathlib import Path
from typing import Annotated

import typer

from domain.config import Evaluation
from domain.errors import ConfigError
from rollbook.connect import STATE, ledger_of
from rollbook.output import print_json, say
from rollbook.stack.stack import Stack
from storage import evaluations
from storage import runs as ledger_runs


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(evaluate)


def evaluate(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    version: Annotated[
        int | None, typer.Option(help="Default: the versions that [evaluation] asks for.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Instead of the one in [evaluation].")] = None,
    state: Annotated[Path, typer.Option(help="Folder of the local stack.")] = STATE,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Play held-out tasks with a version of a run, and keep the rewards in the ledger.

    Results are written once: a version that has them is not played again.

    Example: `rollbook evaluate reverse3 --version 100`
    """
    from rollbook import evaluation

    with Stack.up(state, environ=os.environ) as stack, ledger_of(stack) as ledger:
        config = ledger.call(ledger_runs.read, run).config
        if dataset is not None:
            given = config.evaluation or Evaluation(dataset=dataset)
            chosen = given.model_copy(update={"dataset": dataset})
            config = config.model_copy(update={"evaluation": chosen})
        if config.evaluation is None:
            raise ConfigError(
                f"run {run} has no [evaluation] section; name the held-out data with --dataset"
            )
        name = config.evaluation.dataset
        known = {row["version"] for row in ledger.call(evaluations.summary, run, name)}
        if version is None:
            missing = ledger.call(evaluations.due, run, name, every=config.evaluation.every)
        else:
            missing = [] if version in known else [version]
            have = ledger.call(evaluations.stored, run)
            if missing and version not in have:
                raise ConfigError(
                    f"the weights of {run}@{version} are not stored (they are deleted once nothing "
                    f"needs them); stored are {', '.join(map(str, have)) or 'none'}"
                )
        if missing:
            evaluation.evaluate(ledger, stack.services, config, state, missing, tell=lambda _: None)
        rows = ledger.call(evaluations.summary, run, name)
    if version is not None:
        rows = [row for row in rows if row["version"] == version]
    if json:
        print_json(rows)
        return
    for row in rows:
        say(evaluation.describe(config.evaluation, row))
