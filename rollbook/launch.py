"""The processes of one run on this machine, kept running by a supervisor.

    engine · worker workflows · worker ledger · worker rollouts · trainer · gateway (if it is used)

Each is the same command that a cluster would start (`rollbook.commands.processes`), with the service
addresses in its environment. A process that dies is started again, until it died too often in a row
or refuses its input (exit code 2): then the run stops, with the end of that log. The trainer's clean
exit is the end of the run.
"""

import os
import sys
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from domain.config import RunConfig
from domain.services import VLLM_PYTHON, Services, vllm_python
from rollbook.root import ROOT
from rollbook.stack import ports
from rollbook.stack.child import Command, NotReady, Report, Restart, State
from rollbook.stack.supervise import Supervisor

TRAINER = "trainer"
REFUSED = 2
"""Exit code of a process that was given something wrong; see `rollbook.cli`."""
_SERVICE = Restart(deaths=5, refusals=frozenset({REFUSED}))
_TRAINING = Restart(after="failure", deaths=5, refusals=frozenset({REFUSED}))
_TRAINER_STOP_S = 120.0
"""Longest checkpoint of a trainer that was asked to stop."""
ENGINE_START_S = 600.0
"""Longest start of the engine; vLLM compiles."""


class Job:
    """The processes of one run. A context manager: leaving it stops them all."""

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        state: Path,
        *,
        force: bool = False,
        trainer: bool = True,
        rollouts: bool = True,
        gateway: bool = False,
        engine_only: bool = False,
        on_change: Callable[[Report], None] | None = None,
    ) -> None:
        """Prepare, without starting anything.

        Args:
            config: the run's configuration.
            services: addresses; a built-in engine is started when it names no engine.
            state: folder of the local stack; logs go to `runs/NAME` in it.
            force: the trainer takes the lease even from a holder that is alive.
            trainer: whether to start one; a loop of one's own trains by itself,
            rollouts: and may play its source itself.
            gateway: whether the source samples through one, which is started where `services`
                names none.
            engine_only: start neither these nor a worker: just have an engine, to evaluate on.
            on_change: told each new state of each process.
        """
        self.config = config
        self.folder = state.resolve() / "runs" / config.name
        self._state = state.resolve()
        self._force, self._trainer, self._rollouts = force, trainer, rollouts
        self._engine_only = engine_only
        self._own_engine = not services.engines
        if self._own_engine:
            url = f"http://{ports.LOOPBACK}:{ports.free_port()}"
            services = services.model_copy(update={"engines": (url,), "engines_run": config.name})
        self._own_gateway = gateway and not services.gateway
        if self._own_gateway:
            taken = [int(url.rpartition(":")[2]) for url in services.engines if self._own_engine]
            url = f"http://{ports.LOOPBACK}:{ports.choose(0, taken)}"
            services = services.model_copy(update={"gateway": url})
        self.services = services
        self._on_change = on_change
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> Self:
        self._supervisor = Supervisor(self.folder / "pids", on_change=self._on_change)
        self._supervisor.start(*self._commands())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._supervisor is not None:
            self._supervisor.close()

    @property
    def supervisor(self) -> Supervisor:
        """Runs the processes while the job is entered."""
        if self._supervisor is None:
            raise RuntimeError("the job has not been entered")
        return self._supervisor

    def trainer_ended(self) -> Report | None:
        """The trainer's last report, once it will not be started again."""
        for report in self.supervisor.reports():
            if report.name == TRAINER and report.state in (State.FINISHED, State.FAILED):
                return report
        return None

    def broken(self) -> str | None:
        """A process beside the trainer that will not be started again, and why; None if none is."""
        for report in self.supervisor.reports():
            if report.name != TRAINER and report.state is State.FAILED:
                return self.supervisor.describe(report.name)
        return None

    def stop_trainer(self) -> None:
        """Ask the trainer to checkpoint and close the run; returns when it has ended."""
        self.supervisor.stop(TRAINER)

    def kill_trainer(self) -> None:
        """End the trainer at once; what it has not saved is recomputed when the run is resumed."""
        self.supervisor.kill(TRAINER)

    def _commands(self) -> list[Command]:
        c = self.config
        engine = [self._engine()] if self._own_engine else []
        if self._engine_only:
            return engine
        gateway = []
        if self._own_gateway:
            assert self.services.gateway is not None
            port = self.services.gateway.rpartition(":")[2]
            gateway = [self._command("gateway", "gateway", "--port", port)]
        commands = [
            *engine,
            *gateway,
            self._command("workflows", "worker", "workflows"),
            self._command("ledger", "worker", "ledger"),
        ]
        if self._rollouts:
            queues = [f"--environment={name}" for name in c.environments]
            commands.append(self._command("rollouts", "worker", "rollouts", *queues))
        if c.evaluation is not None and c.evaluation.every is not None:
            commands.append(self._command("evaluator", "evaluator", c.name, restart=_TRAINING))
        if self._trainer:
            force = ("--force",) if self._force else ()
            arguments = ("trainer", c.name, *force)
            commands.append(
                self._command(
                    TRAINER,
                    *arguments,
                    before=torchrun(c.trainer.ranks),
                    # As torchrun would set it, with a banner; the trainer chooses its own number.
                    threads={"OMP_NUM_THREADS": "1"} if c.trainer.ranks > 1 else {},
                    restart=_TRAINING,
                    stop_grace_s=_TRAINER_STOP_S,
                )
            )
        return commands

    def _engine(self) -> Command:
        port = int(self.services.engines[0].rpartition(":")[2])
        return self._command(
            "engine",
            *("engine", "--port", str(port), *engine_options(self.config)),
            ready=lambda: _ask_health(port),
        )

    def _command(
        self,
        name: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        restart: Restart = _SERVICE,
        stop_grace_s: float = 20.0,
        ready: Callable[[], None] | None = None,
        threads: Mapping[str, str] = MappingProxyType({}),
    ) -> Command:
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        return Command(
            name=name,
            argv=(
                sys.executable,
                *before,
                "-m",
                "rollbook",
                *arguments,
                "--state",
                str(self._state),
            ),
            log=self.folder / "logs" / f"{name}.log",
            env={
                **threads,
                **os.environ,
                **self.services.environment(),
                **_vllm(),
                "PYTHONPATH": path,
            },
            cwd=Path(self.config.root),
            restart=restart,
            stop_grace_s=stop_grace_s,
            ready=ready,
            ready_s=ENGINE_START_S,
        )


def torchrun(ranks: int) -> tuple[str, ...]:
    """Modules that start so many processes of the command that follows; none for one process.

    torchrun never starts them again: it ends all when one has ended badly, and then the supervisor
    starts it again, which counts the deaths and knows when to give up.
    """
    if ranks == 1:
        return ()
    return (
        *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ports.LOOPBACK}:0"),
        *("--local-addr", ports.LOOPBACK, "--max-restarts", "0"),
        *("--shutdown-timeout", str(int(_TRAINER_STOP_S) - 10)),
    )


def engine_options(config: RunConfig) -> list[str]:
    """Options of `rollbook engine` for a run's own engine."""
    e = config.engine
    options = ["--max-resident", str(e.max_resident), "--max-batch", str(e.max_batch)]
    options += ["--max-waiting", str(e.max_waiting)]
    if e.threads:
        options += ["--threads", str(e.threads)]
    if e.kind == "vllm":
        options += ["--kind", "vllm", "--max-context", str(config.max_context_tokens)]
        if config.model.lora is not None:
            options += ["--lora-rank", str(config.model.lora.rank)]
        if config.sampling.filtered:
            options.append("--sampling-masks")
        if config.budget.max_images:
            options += ["--images", str(config.budget.max_images)]
        options += [f"--argument={argument}" for argument in e.arguments]
    return options


def _vllm() -> dict[str, str]:
    """The interpreter of vLLM, as the commands find it from their own folder."""
    python = vllm_python(os.environ)
    return {} if python is None else {VLLM_PYTHON: str(python.absolute())}


def _ask_health(port: int) -> None:
    connection = HTTPConnection(ports.LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        raise NotReady(f"nothing answers on port {port} yet") from error
    finally:
        connection.close()
    if status != 200:
        raise NotReady(f"/health answers {status}")
