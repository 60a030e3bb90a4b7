"""`worker`, `trainer`, `engine`, `gateway`: the processes a run consists of, one command each.

`rollbook run` starts them all; on a cluster each is started by itself, with the service addresses
in the environment (`domain.services.VARIABLES`).
"""

import asyncio
import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from domain import holders
from domain.errors import Fenced
from domain.services import vllm_python
from rollbook import traces
from rollbook.connect import STATE, services_for
from rollbook.output import console, log_to_stderr, print_event, print_json, say

State = Annotated[Path, typer.Option(help="Folder of the local stack.")]
Json = Annotated[bool, typer.Option("--json", help="Log JSON lines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(worker)
    app.command()(trainer)
    app.command()(engine)
    app.command()(gateway)
    app.command()(evaluator)
    app.command()(failpoints)


def worker(
    kind: Annotated[Literal["workflows", "rollouts", "ledger"], typer.Argument(help="Which one.")],
    environment: Annotated[
        list[str] | None, typer.Option(help="Environment(s) a rollout worker serves.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Rollout attempts at once in a rollout worker.")
    ] = 256,
    grace: Annotated[
        float, typer.Option(help="Seconds before a ledger worker sweeps up what has got lost.")
    ] = 60.0,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Run one worker until it is told to stop (SIGTERM drains).

    Example: `rollbook worker rollouts --environment reverse3`
    """
    from rollbook.workers import run_worker

    log_to_stderr(logging.INFO, json=json)
    traces.start(f"worker-{kind}", os.environ)
    services = services_for(state)
    asyncio.run(
        run_worker(
            kind,
            services,
            environments=tuple(environment or ["default"]),
            concurrency=concurrency,
            cache=state / "cache",
            grace_s=grace,
        )
    )


def trainer(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    force: Annotated[
        bool, typer.Option(help="Take the lease from a holder that is alive.")
    ] = False,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Train a run that exists in the ledger, until its end or SIGTERM.

    A run with several ranks is trained by as many of these, started by torchrun:
    `torchrun --nproc-per-node 2 -m rollbook trainer NAME`.

    The run's end, a failure included, stands in the ledger, and the exit code is 0, also when
    another trainer has taken over; any other exit code means that the process broke and should be
    started again.

    Example: `rollbook trainer reverse3`
    """
    from trainer.loop import run as train
    from trainer.note import RankLost

    log_to_stderr(logging.INFO, json=json, rank=os.environ.get("RANK"))
    traces.start("trainer", os.environ)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    try:
        final = train(
            run,
            services_for(state),
            holder=holders.here(),
            force=force,
            stop=lambda: bool(stopping),
            environ=os.environ,
        )
    except Fenced as lost:  # started again, it would only fight for the run
        final = f"left to another trainer ({lost})"
    except RankLost as lost:  # which rank went first is in torchrun's report
        logging.getLogger(__name__).error("%s", lost)  # noqa: TRY400
        raise typer.Exit(1) from None
    if json:
        print_event("end", run=run, state=final)
    else:
        say(f"run {run}: {final}")


def evaluator(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    state: State = STATE,
    json: Json = False,
) -> None:
    """Evaluate a run's versions while it goes on, as `[evaluation] every` says, until it has ended.

    Example: `rollbook evaluator reverse3`
    """
    from rollbook.evaluation import follow
    from rollbook.opening import open_ledger

    log_to_stderr(logging.INFO, json=json)
    services = services_for(state)

    async def serve() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        following = asyncio.create_task(work(stopping))
        told = asyncio.create_task(stopping.wait())
        await asyncio.wait([following, told], return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            following.cancel()
        told.cancel()
        await asyncio.gather(following, told, return_exceptions=True)
        if not following.cancelled():
            following.result()

    async def work(stopping: asyncio.Event) -> None:
        # For ever: the trainer ends a run whose ledger is away for too long.
        ledger = await open_ledger(services, application="rollbook evaluator", patience_s=math.inf)
        try:
            await follow(ledger, services, run, state / "cache", stopping)
        finally:
            ledger.close()

    asyncio.run(serve())


def engine(
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    kind: Annotated[
        Literal["builtin", "vllm"],
        typer.Option(help="vllm starts a vLLM server of ROLLBOOK_VLLM_PYTHON's environment."),
    ] = "builtin",
    max_resident: Annotated[
        int,
        typer.Option(help="Policy versions held at once; vLLM holds one, or so many adapters."),
    ] = 4,
    max_batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(help="Requests taken beyond those; more are sent away and ask again.")
    ] = 1024,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="vllm: tokens of the longest context.")
    ] = None,
    lora_rank: Annotated[
        int, typer.Option(help="vllm: serve LoRA adapters of at most this rank.")
    ] = 0,
    sampling_masks: Annotated[
        bool, typer.Option(help="vllm: report kept sets, for filtered sampling.")
    ] = False,
    images: Annotated[
        int, typer.Option(help="vllm: most images of a prompt, for a model that sees.")
    ] = 0,
    argument: Annotated[
        list[str] | None, typer.Option(help="vllm: a further flag of `vllm serve`.")
    ] = None,
    attach: Annotated[
        str | None, typer.Option(help="vllm: base URL of a server that somebody else keeps.")
    ] = None,
    state: State = STATE,
    json: Json = False,
) -> None:
    """Run an inference engine: the built-in one, or a vLLM server with its front.

    Example: `rollbook engine --port 8100`
    """
    log_to_stderr(logging.INFO, json=json)
    traces.start("engine", os.environ)
    if kind == "builtin":
        from engine.main import serve

        serve(
            services_for(state),
            host=host,
            port=port,
            max_resident=max_resident,
            max_batch=max_batch,
            max_waiting=max_waiting,
            threads=threads,
            cache=state / "cache",
        )
        return
    from engine.vllm import main as vllm
    from engine.vllm.command import Settings

    vllm.serve(
        services_for(state),
        Settings(
            python=vllm_python(os.environ) or Path(sys.executable),
            max_batch=max_batch,
            max_waiting=max_waiting,
            max_context=max_context,
            adapters=max_resident if lora_rank else 0,
            lora_rank=lora_rank,
            sampling_masks=sampling_masks,
            images=images,
            arguments=tuple(argument or ()),
            threads=threads,
        ),
        host=host,
        port=port,
        cache=state / "cache",
        environ=os.environ,
        attach=attach,
    )


def gateway(
    port: Annotated[int, typer.Option(help="Port.")] = 8200,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    state: State = STATE,
    json: Json = False,
) -> None:
    """Run the recording gateway: the OpenAI API for the programs of harness sources.

    Rollout workers hand out its address (ROLLBOOK_GATEWAY) with a key for each attempt.

    Example: `rollbook gateway --port 8200`
    """
    from rollbook.gateway import serve

    log_to_stderr(logging.INFO, json=json)
    traces.start("gateway", os.environ)
    asyncio.run(serve(services_for(state), host=host, port=port, cache=state / "cache"))


def failpoints(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the points at which `FAILPOINT=name[:n]` kills a process (for crash tests).

    Example: `FAILPOINT=plan_done:3 rollbook trainer reverse3`
    """
    from domain.failpoints import ALL

    if json:
        print_json(ALL)
        return
    for name, description in ALL.items():
        console.print(f"{name:20} {description}", highlight=False)
