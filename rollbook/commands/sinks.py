"""`log` and `metrics`: step records and the ledger's state in other people's tools."""

from pathlib import Path
from typing import Annotated

import typer

from domain.errors import ConfigError
from rollbook.commands.signals import stop_signal
from rollbook.connect import STATE, open_ledger
from rollbook.output import console, print_json
from rollbook.sinks import copies
from storage import runs as ledger_runs

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
State = Annotated[Path, typer.Option(help="Folder of the local stack.")]

ENDED = ("finished", "failed", "closed")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(log)
    app.command()(metrics)


def log(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    to: Annotated[
        list[str],
        typer.Option(
            help="jsonl:FILE, tensorboard:FOLDER, wandb:PROJECT or mlflow:URI; repeatable."
        ),
    ],
    follow: Annotated[bool, typer.Option(help="Go on until the run ends.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Copy a run's step records to JSONL, TensorBoard, Weights & Biases or MLflow.

    Each step arrives once, however often the trainer or this command was interrupted.

    Example: `rollbook log reverse3 --to tensorboard:runs --to jsonl:reverse3.jsonl --follow`
    """
    stopping = stop_signal()
    with open_ledger(state) as ledger:
        config = ledger.call(ledger_runs.read, run).config
        sinks = {target: copies.open_sink(target, config) for target in to}
        reached = {target: sink.last() for target, sink in sinks.items()}
        try:
            while True:
                ended = ledger.call(ledger_runs.read, run).state in ENDED
                for target, sink in sinks.items():
                    reached[target] = copies.copy(ledger, run, sink, after=reached[target])
                if ended or not follow or stopping.wait(every):
                    break
        finally:
            for sink in sinks.values():
                sink.close()
    if json:
        print_json({"run": run, "last_step": reached})
        return
    for target, step in reached.items():
        console.print(
            f"{target}: {'no step yet' if step is None else f'step {step}'}", markup=False
        )


def metrics(
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 9464,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Serve the state of all runs to Prometheus, at /metrics.

    Example: `rollbook metrics --port 9464`
    """
    try:
        from rollbook.sinks import prometheus
    except ImportError as error:
        raise ConfigError(
            "the endpoint needs prometheus_client; pip install 'rollbook[prometheus]'"
        ) from error
    stopping = stop_signal()
    with open_ledger(state) as ledger:
        server = prometheus.serve(ledger, host=host, port=port)
        url = f"http://{host}:{server.server_port}/metrics"
        if json:
            print_json({"url": url})
        else:
            console.print(url, highlight=False)
        stopping.wait()
        server.shutdown()
        server.server_close()
