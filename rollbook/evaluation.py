"""Held-out evaluation of one policy version on the engine that serves it.

The same source plays other tasks, pinned to the version; nothing of it enters a group, and results
go to `ledger.evaluations`. Each rollout has a seed of its own; at temperature 0 it is greedy.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from activities.album import Album
from activities.chat import Chat
from activities.inference import EngineClient, SamplingParams
from activities.play import play
from domain import sources
from domain.config import Evaluation, RunConfig
from domain.errors import BudgetExhausted, ConfigError
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

_AT_ONCE = 64


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
        )
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
        for version in chosen:
            sampling = _evaluate(ledger, job.services, config, version, state / "cache")
            results = asyncio.run(sampling)
            ledger.call(evaluations.record, config.name, name, version, results)
            tell(version)


def describe(config: Evaluation, row: Mapping[str, Any]) -> str:
    """One version's held-out results as a line of text."""
    how = "greedy" if config.temperature == 0 else f"at temperature {config.temperature:g}"
    return (
        f"held out  {row['name']} at v{row['version']}, {how}: {row['n']} rollouts, "
        f"mean reward {row['mean']:.3f}, exact (reward 1) {row['solved']:.3f}"
    )


async def _evaluate(
    ledger: Ledger, services: Services, config: RunConfig, version: int, cache: Path
) -> list[Result]:
    assert config.evaluation is not None
    run = config.name
    world = ledger.call(ledger_runs.read, run).world
    weights = ledger.call(versions.weights, run, version)
    key = str(world["model_manifest"])  # models/SHA256/manifest.json
    folder = cache / Path(key).parent
    store = ObjectStore(services)
    fetch(store, key, folder)
    album = Album(ledger, store)
    chat = Chat.open(folder, renderer=config.model.renderer)
    source = sources.load(config)
    tasks = datasets.read_tasks(
        config.evaluation.dataset, root=Path(config.root), key="evaluation.dataset"
    )
    engines = EngineClient()
    engine = services.engines[0]
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(task: Task, sample: int) -> Result:
        async with limit:
            name = f"evaluation/{run}@{version}/{task.id}/{sample}"
            recorder = Recorder(engines, engine, config, version, chat, album, name)
            outcome = await play(source, task, recorder, config=config, chat=chat)
        reward = outcome.reward.value if isinstance(outcome.reward, Reward) else outcome.reward
        return Result(task=task.id, sample=sample, status=outcome.status, reward=reward)

    try:
        await engines.load(
            engine, policy_name(run, version), weights.manifest_key, weights.sha256.hex()
        )
        pairs = [(task, s) for task in tasks for s in range(config.evaluation.samples)]
        return list(await asyncio.gather(*(one(task, sample) for task, sample in pairs)))
    finally:
        await engines.aclose()
