"""The processes beside a loop of one's own: services, workers and an engine, and their end.

    services=None   the local stack in the state folder is started, or joined
    always          workflow and ledger workers as child processes
    the source      importable by `module:name`: a rollout worker as a child process;
                    otherwise one in a thread of this process, with an event loop of its own
    no engine       a built-in engine as a child process

Children die with this process, however it ends; the next one finds everything in the ledger.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from domain.config import RunConfig
from domain.environments import samples_at_gateway
from domain.errors import RollbookError
from domain.services import Services
from rollbook import traces
from rollbook.launch import Job
from rollbook.own_config import Located
from rollbook.stack.child import State
from rollbook.stack.stack import Stack
from storage.database import check_schema, upgrade

CONCURRENCY = 256
"""Rollouts at once."""

_JOIN_S = 30.0


class Companions:
    """Runs until closed. Services are up when it is made; workers follow with `start`."""

    def __init__(self, services: Services | None, state: Path) -> None:
        """Bring the services up.

        Args:
            services: addresses; None starts or joins the local stack.
            state: folder of the local stack, and of logs.

        Raises:
            ConfigError: a service cannot be used.
            SchemaMismatch: the ledger's schema is not this code's.
        """
        self.state = state.resolve()
        self._stack = ExitStack()
        self._job: Job | None = None
        self._thread: RolloutThread | None = None
        with ExitStack() as opening:
            if services is None:
                local = opening.enter_context(Stack.up(self.state, environ=os.environ))
                services = local.services
                (upgrade if "postgres" in local.embedded else check_schema)(services.database_url)
            else:
                check_schema(services.database_url)
            self.services = services
            self._stack = opening.pop_all()

    def start(self, config: RunConfig, located: Located) -> None:
        """Start the workers of a run, and an engine where none is configured.

        Args:
            config: as the ledger has it.
            located: the source, which is played here if other processes cannot import it.
        """
        if self._job is not None:
            return
        traces.start("loop", os.environ)
        here = located.reference is None or located.reference != config.tasks.source
        gateway = samples_at_gateway(located.source)
        job = Job(
            config, self.services, self.state, trainer=False, rollouts=not here, gateway=gateway
        )
        self._job = self._stack.enter_context(job)
        if here:
            self._thread = RolloutThread(
                located.source,
                job.services,
                environment=config.tasks.environment,
                cache=self.state / "cache",
            )
            self._stack.callback(self._thread.stop)
        self.services = job.services

    def check(self) -> None:
        """Raise if something that samples for the run has broken for good.

        Raises:
            RollbookError: names the process and its log.
        """
        if self._thread is not None:
            self._thread.check()
        for report in self._job.supervisor.reports() if self._job is not None else ():
            if report.state is State.FAILED:
                raise RollbookError(f"process {report.name} broke: {report.detail}")

    def close(self) -> None:
        """Stop what this process started, workers first."""
        self._stack.close()


class RolloutThread:
    """A rollout worker inside the calling process."""

    def __init__(self, source: Any, services: Services, *, environment: str, cache: Path) -> None:
        """Start it."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._main: Callable[[], Any] = lambda: _rollouts(
            source, services, environment, cache, self._stopping
        )
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended it."""
        if self._error is not None:
            raise RollbookError(
                f"the rollout worker in this process broke: {self._error}"
            ) from self._error

    def stop(self) -> None:
        """Drain it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except Exception as error:  # noqa: BLE001 - raised by `check`, in the caller's thread
            self._error = error
        finally:
            self._loop.close()


async def _rollouts(
    source: Any, services: Services, environment: str, cache: Path, stopping: asyncio.Event
) -> None:
    from rollbook.workers import run_rollouts

    await run_rollouts(
        source,
        services,
        environment=environment,
        concurrency=CONCURRENCY,
        cache=cache,
        stopping=stopping,
    )
