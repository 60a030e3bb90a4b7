"""Held-out evaluation of policy versions: while a run goes on (`follow`), or afterwards.

The same source plays other tasks, pinned to the version; nothing of it enters a group, and results
go to `ledger.evaluations`. Each rollout has a seed of its own; at temperature 0 it is greedy. Rollouts
that are trained come first: an engine takes an evaluation's requests only when it has room.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.album import Album
from activities.chat import Chat
from activities.inference import EngineClient, SamplingParams
from activities.play import play
from domain import sources
from domain.config import Evaluation, RunConfig
from domain.environments import Source
from domain.errors import BudgetExhausted, ConfigError, EngineError, EngineUnavailable
from domain.ids import fold, policy_name
from domain.images import Image, placed
from domain.rollouts import Reward, Segment, Task
from domain.services import Services
from domain.tools import Message
from rollbook.launch import ENGINE_START_S, Job
from storage import datasets, evaluations, versions
from storage import runs as ledger_runs
from storage.database import Ledger
from storage.evaluations import Result
from storage.manifests import fetch
from storage.objects import ObjectStore

logger = logging.getLogger(__name__)

_AT_ONCE = 64
_POLL_S = 0.5
_OVER = ("finished", "failed", "closed")
"""States in which nothing keeps versions on the engines of a run."""
_PRIORITY = 1
"""Behind every rollout that is trained, which ask with 0."""


class Recorder:
    """Samples one evaluation rollout; keeps nothing."""

    base_url = ""
    api_key = ""
    recorded: Sequence[Segment] = ()
    deadline_reached = False

    def __init__(
        self,
        engines: EngineClient,
        engine: str,
        config: RunConfig,
        version: int,
        chat: Chat,
        album: Album,
        name: str,
        lost: list[EngineError],
    ) -> None:
        assert config.evaluation is not None
        self.version = version
        self._engines = engines
        self._engine = engine
        self._config = config
        self._album = album
        self._temperature = config.evaluation.temperature
        self._stop = tuple(sorted(chat.stop_ids))
        self._name = name
        self._lost = lost
        self._segments = 0
        self._state: Any = None

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> Segment:
        budget = self._config.budget.segment_tokens
        number, self._segments = self._segments, self._segments + 1
        try:
            answer = await self._engines.generate(
                self._engine,
                policy_name(self._config.name, self.version),
                prompt_ids,
                SamplingParams(
                    max_tokens=min(max_tokens or budget, budget),
                    seed=fold("evaluation", self._config.seed, self._name, number),
                    temperature=self._temperature,
                    stop_token_ids=self._stop,
                ),
                request_id=f"{self._name}/{number}",
                salt=f"evaluation-{self.version}",
                images=await self._album.parts(images),
                priority=_PRIORITY,
            )
        except EngineError as error:
            # The rollout would end as infra_error, and count as one that the policy failed.
            self._lost.append(error)
            raise
        if images and answer.context > self._config.max_context_tokens:
            raise BudgetExhausted("context")
        return Segment(
            answer.prompt_ids or prompt_ids,
            answer.sampled_ids,
            answer.logprobs,
            answer.finish_reason,
            self.version,
            images=placed(images, answer.places),
        )

    async def keep(self, image: Image) -> None:
        await self._album.keep(image)

    async def chat(self, messages: list[Message], *, tools: Sequence[Any] = ()) -> Message:
        raise RuntimeError("play() gives session sources a recorder of its own")

    def progress(self, phase: str, **facts: Any) -> None:
        pass

    async def save(self, state: Any) -> None:
        self._state = state

    async def saved(self) -> Any | None:
        return self._state


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
            if exam is None:
                exam = await asyncio.to_thread(_exam, ledger, services, found.config, cache)
            routes = [
                r.engine for r in await ledger.run(versions.routable, run) if r.version == version
            ]
            try:
                results = await exam.take(engines, routes, version)
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
        limit = asyncio.Semaphore(_AT_ONCE)
        lost: list[EngineError] = []

        async def one(number: int, task: Task, sample: int) -> Result | None:
            name = f"evaluation/{self.config.name}@{version}/{task.id}/{sample}"
            url = urls[number % len(urls)]
            recorder = Recorder(
                engines, url, self.config, version, self.chat, self.album, name, lost
            )
            async with limit:
                if lost:
                    return None
                outcome = await play(
                    self.source, task, recorder, config=self.config, chat=self.chat
                )
            reward = outcome.reward.value if isinstance(outcome.reward, Reward) else outcome.reward
            return Result(task=task.id, sample=sample, status=outcome.status, reward=reward)

        pairs = [(t, s) for t in self.tasks for s in range(self.config.evaluation.samples)]
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(one(n, t, s)) for n, (t, s) in enumerate(pairs)]
        except ExceptionGroup as broken:
            raise broken.exceptions[0] from None
        if lost:
            raise lost[0]
        return [result for task in playing if (result := task.result()) is not None]


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
