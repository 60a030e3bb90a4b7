"""A real run in real processes, each of which can be killed, frozen, starved or restarted.

    engine · worker workflows · worker ledger · worker rollouts · trainer      (`python -m rollbook …`)

Leases, heartbeats and grace periods are scaled to a second or two. `Stage.check` is the invariant
suite: whatever was done to the run, it must hold when the run has ended.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import conninfo, sql
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from domain.config import RunConfig
from domain.services import Services
from rollbook.launch import torchrun
from rollbook.root import ROOT
from rollbook.stack import ports
from rollbook.stack.child import Command, Report, Restart, State, tail
from rollbook.stack.stack import Stack
from rollbook.stack.supervise import Supervisor
from rollbook.stack.temporal import Temporal
from storage import database, runs
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from tests.chaos import invariants
from tests.chaos.clocks import wrong_clock
from tests.chaos.walk import configuration, pause
from tests.ledger_fixtures import check_invariants
from trainer import audit

PROCESSES = ("engine", "workflows", "ledger", "rollouts", "trainer")
_RANK_DIED = re.compile(r"exitcode\s*: 137")
PATIENCE_S = 120.0
"""Longest wait for anything; a hang is a failure."""


@dataclass
class Stage:
    """The processes of one run. A context manager: leaving it stops them all."""

    services: Services
    config: RunConfig
    folder: Path
    grace_s: float = 2.0
    supervisor: Supervisor = field(init=False)
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.config.name
        self.services = self.services.model_copy(
            update={"engines": (f"http://127.0.0.1:{ports.choose(0)}",)}
        )
        self.store = ObjectStore(self.services)
        self.places: dict[str, Services] = {}
        """Other addresses for one process, through a proxy."""
        self.clocks: dict[str, float] = {}
        """Seconds by which a process's own clock is wrong."""

    @classmethod
    @contextlib.contextmanager
    def of(cls, services: Services, folder: Path, **sections: Any) -> "Iterator[Stage]":
        """A stage with a ledger, a namespace, a bucket and a run of its own; nothing runs yet."""
        name = f"c{secrets.token_hex(4)}"
        url = new_database(services.database_url, name)
        own = services.model_copy(
            update={
                "database_url": url,
                "temporal_namespace": name,
                "s3_bucket": f"bucket-{name}",
            }
        )
        with cls(own, configuration(name, folder / "root", **sections), folder) as stage:
            stage.store.prepare()
            stage.ledger.call(runs.create, stage.config, world={})
            yield stage

    def begin(self, **sections: Any) -> None:
        """Another run on the same processes; the one before must have ended."""
        self.run = f"{self.run.partition('-')[0]}-{secrets.token_hex(3)}"
        self.config = configuration(self.run, self.folder / self.run, **sections)
        self.ledger.call(runs.create, self.config, world={})

    def pause(self, seconds: float) -> None:
        """How long each turn's tool takes in this run, from now on."""
        pause(Path(self.config.root), seconds)

    def hang_one(self) -> None:
        """Let the tool of the next rollout that uses it never answer."""
        (Path(self.config.root) / "hang").touch()

    def __enter__(self) -> Self:
        self.supervisor = Supervisor(self.folder / "pids")
        self.ledger = Ledger.open(
            self.services.database_url, pool=3, application="stage", patience_s=60
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for name in PROCESSES:
                said = tail(self.log(name))
                error.add_note(f"---- {name}\n{said}")
        self.supervisor.close()
        self.ledger.close()

    # -- the processes

    def start(self, *names: str, **options: Any) -> None:
        """Start processes under supervision: they come back when they die."""
        self.supervisor.start(*(self.command(name, **options) for name in names))

    def start_all(self) -> None:
        self.start(*PROCESSES)

    def command(
        self, name: str, *, failpoint: str | None = None, restart: Restart | None = None
    ) -> Command:
        port = self.services.engines[0].rpartition(":")[2]
        limits = ("--max-resident", "6", "--threads", "1")
        arguments = {
            "engine": ("engine", "--port", port, *limits),
            "workflows": ("worker", "workflows"),
            "ledger": ("worker", "ledger", "--grace", str(self.grace_s)),
            "rollouts": ("worker", "rollouts"),
            "trainer": ("trainer", self.run),
        }[name.partition("-")[0]]
        if name == "trainer-forced":
            arguments += ("--force",)
        env = self.environment(name)
        if failpoint is not None:
            env["FAILPOINT"] = failpoint
        once = name.startswith("trainer")
        before = torchrun(self.config.trainer.ranks) if once else ()
        return Command(
            name=name,
            argv=(
                sys.executable,
                *before,
                "-m",
                "rollbook",
                *arguments,
                "--state",
                str(self.folder),
            ),
            log=self.log(name),
            env=env,
            cwd=Path(self.config.root),
            restart=restart
            or Restart(after="failure" if once else "always", deaths=5 if once else None),
            stop_grace_s=30,
        )

    def environment(self, name: str) -> dict[str, str]:
        """Of a process."""
        services = self.places.get(name, self.services)
        env = {**os.environ, **services.environment(), "PYTHONPATH": str(ROOT)}
        env |= {"OMP_NUM_THREADS": "1", "ROLLBOOK_LOG": "INFO"}
        if name in self.clocks:
            env |= wrong_clock(self.folder / f"clock-{name}", self.clocks[name])
        return env

    def run_trainer(self) -> None:
        """Start the trainer unless one runs, or has trained the run to its end."""
        present = [r for r in self.supervisor.reports() if r.name == "trainer"]
        running = any(r.pid or r.state is State.WAITING for r in present)
        if not running and self.found().state != "finished":
            self.start("trainer")

    def crash(self, name: str, failpoint: str, *, or_end: bool = False) -> None:
        """Run a process that must die at a failpoint; it is not started again by itself.

        Args:
            name: which.
            failpoint: `POINT` or `POINT:COUNT`.
            or_end: it may also end by itself without getting there.
        """
        if any(r.name == name and r.pid for r in self.supervisor.reports()):
            self.stop(name)
        self.start(name, failpoint=failpoint, restart=Restart(after="never"))
        code = self.supervisor.wait(name, timeout_s=PATIENCE_S)
        said = tail(self.log(name))
        if self.config.trainer.ranks > 1 and code and _RANK_DIED.search(said):
            code = 137  # torchrun's own is 1
        allowed = (137, 0) if or_end else (137,)
        assert code in allowed, f"{name} did not reach {failpoint}: {code}\n{said}"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def report(self, name: str) -> Report:
        return next(r for r in self.supervisor.reports() if r.name == name)

    def pid(self, name: str) -> int:
        """Of the process that is running now; waits for one that is being started again."""
        found: list[int] = []

        def look() -> bool:
            pid = self.report(name).pid
            found[:] = [] if pid is None else [pid]
            return bool(found)

        self.until(look, f"{name} runs")
        return found[0]

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def kill(self, name: str) -> None:
        """kill -9, and wait until the supervisor has started another."""
        before = self.report(name).restarts
        self.signal(name)
        self.until(lambda: self.report(name).restarts > before, f"{name} is started again")

    def kill_all(self) -> None:
        """kill -9 of everything at once; nothing comes back by itself."""
        pids = [r.pid for r in self.supervisor.reports() if r.pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that nobody sees the others die
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.supervisor.stop()

    def stop(self, *names: str) -> None:
        self.supervisor.stop(*names)

    def rest(self, seconds: float) -> None:
        """Let time pass: longer than a heartbeat, for what must *not* happen meanwhile."""
        time.sleep(seconds)

    @staticmethod
    def wake(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # -- the services

    def kill_server(self, stack: Stack, name: str) -> None:
        """kill -9 of a server, which is started again at once."""
        servers = stack.supervisor
        assert servers is not None
        (before,) = (r for r in servers.reports() if r.name == name)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        self.until(
            lambda: any(r.restarts > before.restarts for r in servers.reports() if r.name == name),
            f"{name} is started again",
        )
        servers.wait_ready(name)

    def wipe_temporal(self, stack: Stack) -> None:
        """Stop Temporal, delete its database, start it again."""
        assert stack.supervisor is not None
        address, ui = stack.services.temporal_address, str(stack.services.temporal_ui)
        server = Temporal(
            state=stack.folder.path,
            port=int(address.rpartition(":")[2]),
            ui_port=int(ui.rpartition(":")[2]),
        )
        stack.supervisor.stop("temporal")
        for file in (stack.folder.path / "temporal").iterdir():
            file.unlink()
        stack.supervisor.start(server.command())
        stack.supervisor.wait_ready("temporal")

    # -- waiting

    def until(self, holds: Callable[[], Any], what: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Poll until something holds; a run that fails meanwhile fails the test with its cause."""
        end = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"after {timeout_s:.0f} s not yet: {what}; {self.story()}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.found().next_step >= step, f"step {step} is next")

    def until_rollouts_run(self, *, tokens: int = 1) -> None:
        """Until rollouts are in the middle of their work."""
        query = (
            "SELECT count(*) AS n FROM attempts WHERE run_id = %s AND state = 'running' "
            "AND policy_tokens >= %s"
        )
        self.until(lambda: self.value(query, self.run, tokens), "rollouts are under way")

    def until_full_work(self, *, step: int = 1) -> None:
        """Start everything with slow tools, until a step is trained and rollouts are under way."""
        self.pause(0.3)
        self.start_all()
        self.until_step(step)
        self.until_rollouts_run()

    def finish(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Until the trainer has trained the run to its end."""

        def ended() -> bool:
            found = self.found()
            assert found.state != "failed", f"{found.failure}"
            return found.state == "finished"

        self.until(ended, "the run is finished", timeout_s=timeout_s)
        self.until(
            lambda: (
                not any(r.name.startswith("trainer") and r.pid for r in self.supervisor.reports())
            ),
            "the trainers have ended",
        )

    # -- looking

    def found(self) -> runs.Run:
        return self.ledger.call(runs.read, self.run)

    def query(self, query: str, *args: Any) -> list[dict[str, Any]]:
        def ask(tx: Tx) -> list[dict[str, Any]]:
            return tx.execute(query, args).fetchall()

        return self.ledger.call(ask)

    def value(self, query: str, *args: Any) -> Any:
        (row,) = self.query(query, *args)
        (value,) = row.values()
        return value

    def story(self) -> str:
        """What the ledger says, for a failed test."""
        waiting = self.query("SELECT * FROM waiting WHERE run_id = %s", self.run)
        balance = self.query("SELECT * FROM balance WHERE run_id = %s", self.run)
        live = self.query(
            "SELECT group_id, sample, attempt, gen, state, cancel_cause, policy_tokens, worker, "
            "last_progress_at FROM attempts WHERE run_id = %s AND state IN ('submitted', 'running')",
            self.run,
        )
        failure = self.found().failure
        return f"failure={failure}\n{waiting}\n{balance}\n" + "\n".join(map(str, live))

    # -- the invariant suite

    def check(self, *, failures: str | None = None) -> None:
        """Everything that must hold when the run has ended, whatever was done to it.

        Args:
            failures: text that the errors of failed attempts hold; None if none may have failed.
        """
        self.until(self._settled, "the outbox and the workflows of the run have settled")
        self.ledger.call(check_invariants)
        found = self.found()
        assert found.durable_step == found.next_step
        invariants.check_tokens(self)
        invariants.check_failures(self, failures)
        invariants.check_objects(self)
        invariants.check_plans(self)
        if found.shares == 1:
            for verdict in audit.replay(self.run, self.services, first=found.first_step):
                assert verdict.exact, verdict
        else:
            self._audit_with_ranks()

    def _audit_with_ranks(self) -> None:
        """The audit of all steps, which starts as many processes as the run has ranks."""
        done = subprocess.run(
            [*(sys.executable, "-m", "rollbook", "audit", self.run), "--state", str(self.folder)],
            env=self.environment("audit"),
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_S,
            check=False,
        )
        steps = self.found().next_step - self.found().first_step
        assert done.stdout.count(": exact (") == steps, done.stdout + done.stderr

    def _settled(self) -> bool:
        """I3, I4: nothing undelivered; no workflow of the run is left."""
        undone = self.value(
            "SELECT count(*) FROM outbox WHERE run_id = %s AND done_at IS NULL", self.run
        )
        running = self.value(
            "SELECT count(*) FROM attempts WHERE run_id = %s AND state IN ('submitted', 'running')",
            self.run,
        )
        return not undone and not running and not asyncio.run(self._workflows())

    async def _workflows(self) -> list[str]:
        client = await self.client()
        query = f'RollbookRun = "{self.run}" AND ExecutionStatus = "Running"'
        try:
            return [w.id async for w in client.list_workflows(query)]
        except RPCError as error:
            if error.status is RPCStatusCode.INVALID_ARGUMENT:  # no search attributes: it was wiped
                return ["unknown"]
            raise

    async def client(self) -> Client:
        return await Client.connect(
            self.services.temporal_address, namespace=self.services.temporal_namespace
        )

    async def workflow_status(self, workflow_id: str) -> WorkflowExecutionStatus | None:
        client = await self.client()
        return (await client.get_workflow_handle(workflow_id).describe()).status


def new_database(url: str, name: str) -> str:
    """A migrated ledger of its own beside the given database."""
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    own = conninfo.make_conninfo(url, dbname=name)
    database.upgrade(own)
    return own


def holder() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
