"""Held-out evaluation of policy versions: while a run goes on (`follow`), or afterwards.

The same source plays other tasks, pinned to the version; nothing of it enters a group, and results
go to `ledger.evaluations`. Each rollout has a seed of its own; at temperature 0 it is greedy. Rollouts
that are trained come first: an engine takes an evaluation's requests only when it has room. Programs of
harnesses sample at a gateway of the evaluator's own, on its machine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.album import Album
from activities.chat import Chat
from activities.gateway import Gateway
from activities.held_out import Asked, HeldOut, HeldOutBook
from activities.inference import EngineClient
from activities.play import play
from activities.sessions import Sessions
from domain import sources
from domain.config import Evaluation, RunConfig
from domain.environments import Source, samples_at_gateway
from domain.errors import ConfigError, EngineError, EngineUnavailable, ObjectError
from domain.ids import policy_name
from domain.messages import AttemptIn
from domain.rollouts import Reward, Status, Task
from domain.services import Services
from rollbook.gateway import make_server
from rollbook.launch import ENGINE_START_S, Job
from rollbook.stack import ports
from storage import datasets, evaluations, versions
from storage import runs as ledger_runs
from storage.database import Ledger
from storage.evaluations import Result
from storage.manifests import fetch
from storage.objects import ObjectStore

logger = logging.getLogger(__name__)

_AT_ONCE = 64
_PROGRAMS_AT_ONCE = 8
"""Each is a process, beside those that the rollouts of the run have."""
_POLL_S = 0.5
_RETRY_S = 5.0
"""Seconds between two tries at an object store that is out."""
_OVER = ("finished", "failed", "closed")
"""States in which nothing keeps versions on the engines of a run."""


def evaluate(
    ledger: Ledger,
    services: Services,
    config: RunConfig,
    state: Path,
    chosen: Sequence[int],
    *,
    tell: Callable[[int], None],
) -> None:
    """Evaluate versions on `[evaluation]` and keep the results.

    The built-in engine is started for it unless the services name engines: the one of the run lets
    go of versions that nothing samples.

    Args:
        ledger: where results go.
        services: engines, if any, and the object store.
        config: the run, with an `evaluation` section.
        state: folder of the local stack.
        chosen: versions whose weights are stored.
        tell: told each version whose results are kept.

    Raises:
        LedgerError: a version's weights are not stored.
        ConfigError: the run has no `evaluation` section, or its data cannot be read.
    """
    if config.evaluation is None:
        raise ConfigError(
            f"run {config.name} has no [evaluation] section; name the held-out data with --dataset"
        )
    name = config.evaluation.dataset
    with Job(config, services, state, engine_only=True) as job:
        if not services.engines:
            job.supervisor.wait_ready(timeout_s=ENGINE_START_S)
        exam = _exam(ledger, job.services, config, state / "cache")
        for version in chosen:
            results = asyncio.run(_evaluate(ledger, job.services, exam, version))
            ledger.call(evaluations.record, config.name, name, version, results)
            tell(version)


def describe(config: Evaluation, row: Mapping[str, Any]) -> str:
    """One version's held-out results as a line of text."""
    how = "greedy" if config.temperature == 0 else f"at temperature {config.temperature:g}"
    return (
        f"held out  {row['name']} at v{row['version']}, {how}: {row['n']} rollouts, "
        f"mean reward {row['mean']:.3f}, exact (reward 1) {row['solved']:.3f}"
    )


async def follow(
    ledger: Ledger, services: Services, run: str, cache: Path, stopping: asyncio.Event
) -> None:
    """Evaluate the pinned versions of a run on the engines that serve it, until it has ended.

    Killed at any moment it loses at most the version it was at, which is pinned still and is
    evaluated again. What it does not come to is evaluated when the run has ended.

    Args:
        ledger: where the run stands.
        services: the object store.
        run: its name.
        cache: folder of model folders.
        stopping: set it to end.

    Raises:
        ConfigError: the run has no `evaluation` section, or its data cannot be read.
    """
    exam: Exam | None = None
    engines = EngineClient()
    try:
        while not stopping.is_set():
            found = await ledger.run(ledger_runs.read, run)
            if found.state in _OVER:
                await ledger.run(evaluations.release, run)
                return
            version = await ledger.run(evaluations.next_pinned, run)
            if version is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), _POLL_S)
                continue
            routes = [
                r.engine for r in await ledger.run(versions.routable, run) if r.version == version
            ]
            try:
                if exam is None:
                    exam = await asyncio.to_thread(_exam, ledger, services, found.config, cache)
                results = await exam.take(engines, routes, version)
            except ObjectError as error:
                if (
                    type(error) is not ObjectError
                ):  # missing or damaged: asked again, it is the same
                    raise
                logger.warning("evaluation of %s@%d: %s; trying again", run, version, error)
                await asyncio.sleep(_RETRY_S)
            except EngineUnavailable as error:
                logger.warning("evaluation of %s@%d: %s; trying again", run, version, error)
                await asyncio.sleep(_POLL_S)
            except EngineError as error:  # asked again, the engine would say the same
                logger.warning("evaluation of %s@%d is given up: %s", run, version, error)
                await ledger.run(evaluations.let_go, run, version)
            else:
                await ledger.run(evaluations.finish, run, exam.name, version, results)
                logger.info("evaluated %s@%d: %d rollouts", run, version, len(results))
    finally:
        await engines.aclose()


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What every version of a run is asked."""

    config: RunConfig
    chat: Chat
    album: Album
    source: Source
    tasks: Sequence[Task]

    @property
    def name(self) -> str:
        """What its results are kept under."""
        assert self.config.evaluation is not None
        return self.config.evaluation.dataset

    async def take(self, engines: EngineClient, urls: Sequence[str], version: int) -> list[Result]:
        """Play every task with a version that these engines hold, spread over them.

        Raises:
            EngineError: an engine failed, or let go of the version.
        """
        if not urls:
            raise EngineUnavailable(f"no engine holds version {version} any more")
        assert self.config.evaluation is not None
        asked = Asked(
            engines=engines,
            config=self.config,
            version=version,
            chat=self.chat,
            album=self.album,
        )
        samples = self.config.evaluation.samples
        pairs = [(n, t, s) for n, t in enumerate(self.tasks) for s in range(samples)]
        async with self._gateway() as gateway:
            limit = asyncio.Semaphore(_AT_ONCE if gateway is None else _PROGRAMS_AT_ONCE)

            async def one(number: int, task: Task, sample: int) -> Result | None:
                which = AttemptIn(
                    run=self.config.name, group=number, sample=sample, attempt=version
                )
                url = urls[(number * samples + sample) % len(urls)]
                at = None if gateway is None else gateway.url
                rollout = HeldOut(asked, url, which, task, at)
                async with limit:
                    return None if asked.lost else await self._play(rollout, gateway)

            try:
                async with asyncio.TaskGroup() as group:
                    playing = [group.create_task(one(*pair)) for pair in pairs]
            except ExceptionGroup as broken:
                raise broken.exceptions[0] from None
        if asked.lost:
            raise asked.lost[0]
        return [result for task in playing if (result := task.result()) is not None]

    async def _play(self, rollout: HeldOut, gateway: "_Gateway | None") -> Result:
        """One rollout, within the time that an attempt has."""
        task, sample = rollout.task.id, rollout.which.sample
        if gateway is not None:
            gateway.book.open(rollout)
        limit = asyncio.timeout(self.config.groups.timeout)
        try:
            async with limit:
                outcome = await play(
                    self.source, rollout.task, rollout, config=self.config, chat=self.chat
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return Result(task=task, sample=sample, status=Status.CANCELLED, reward=None)
        finally:
            if gateway is not None:
                gateway.book.close(rollout)
        if rollout.failure is not None:
            return Result(task=task, sample=sample, status=Status.INFRA_ERROR, reward=None)
        reward = outcome.reward.value if isinstance(outcome.reward, Reward) else outcome.reward
        return Result(task=task, sample=sample, status=outcome.status, reward=reward)

    @asynccontextmanager
    async def _gateway(self) -> "AsyncIterator[_Gateway | None]":
        """A gateway on this machine for as long as programs are evaluated; None: the source has none."""
        if not samples_at_gateway(self.source):
            yield None
            return
        book, port = HeldOutBook(self.config, self.chat), ports.choose(0)
        server = make_server(Gateway(Sessions(book)), host="127.0.0.1", port=port)
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:
                if serving.done():
                    raise EngineUnavailable(f"the evaluator's gateway cannot listen on port {port}")
                await asyncio.sleep(0.01)
            yield _Gateway(f"http://127.0.0.1:{port}", book)
        finally:
            server.stop()
            await serving


@dataclass(frozen=True, slots=True)
class _Gateway:
    """Where programs of an evaluation sample."""

    url: str
    book: HeldOutBook


def _exam(ledger: Ledger, services: Services, config: RunConfig, cache: Path) -> Exam:
    evaluation = config.evaluation
    assert evaluation is not None
    alone = config.of(evaluation.environment or config.tasks.environment)
    world = ledger.call(ledger_runs.read, config.name).world
    key = str(world["model_manifest"])  # models/SHA256/manifest.json
    folder = cache / Path(key).parent
    store = ObjectStore(services)
    fetch(store, key, folder)
    return Exam(
        config=alone,
        chat=Chat.open(folder, renderer=config.model.renderer),
        album=Album(ledger, store),
        source=sources.load(alone),
        tasks=datasets.read_tasks(
            evaluation.dataset, evaluation.args, root=Path(config.root), key=datasets.HELD_OUT
        ),
    )


async def _evaluate(ledger: Ledger, services: Services, exam: Exam, version: int) -> list[Result]:
    """A version's results on an engine that is made to hold it."""
    run = exam.config.name
    weights = ledger.call(versions.weights, run, version)
    engines, engine = EngineClient(), services.engines[0]
    policy = policy_name(run, version)
    try:
        held = policy in (await engines.health(engine)).policies
        await engines.load(engine, policy, weights.manifest_key, weights.sha256.hex())
        results = await exam.take(engines, [engine], version)
        if not held:  # the next version needs the slot
            await engines.unload(engine, policy)
        return results
    finally:
        await engines.aclose()
