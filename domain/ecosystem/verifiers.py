"""Installed environments of the verifiers package, sampled through the recording gateway.

verifiers drives its own program, tools and scoring, and only its requests to the model come here:
each episode gets the address and key of its attempt. `args` is verifiers' own `[env]` block without
the id, for instance `{agent = {harness = {id = "null"}, runtime = {type = "subprocess"}}}`.

The package must be installed where the trainer reads the tasks and where workers play them.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from domain.environments import Outcome, Recorder
from domain.errors import ConfigError, InfrastructureError
from domain.rollouts import Reward, Status, Task

Args = Mapping[str, Any]
SIZE = "size"
"""The one argument that is not verifiers': how many tasks are taken, for tasksets without end."""
_MODEL = "policy"
_serving: set[asyncio.Task[None]] = set()
"""What keeps shared servers up: the loop itself holds its tasks weakly, and one that were collected
with its source would leave them running."""


class VerifiersSource:
    """Plays episodes of one environment. Its shared servers live as long as the worker's loop."""

    gateway = True

    def __init__(self, env: Any) -> None:
        """Nothing is served yet.

        Args:
            env: a `verifiers.v1.Env` with one seat.
        """
        self._env = env
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    async def run(self, task: Task, recorder: Recorder) -> Outcome:
        """One episode.

        Raises:
            InfrastructureError: verifiers could not play or score it.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        env = self._env
        kind = type(env.taskset).task_type()
        row = kind(kind.data_type().model_validate(task.data["task"]), env.config.taskset.task)
        await self._served()
        async with _key(recorder.api_key) as variable:
            client = EvalClientConfig(base_url=recorder.base_url, api_key_var=variable)
            episode = await env.run_episode(row, ModelContext(model=_MODEL, client=client))
        return _outcome(episode)

    async def _served(self) -> None:
        """Bring up what all episodes share, once; it goes down when the event loop ends."""
        if self._serving is None or self._serving.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._ready))
            _serving.add(self._serving)
            self._serving.add_done_callback(_serving.discard)
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(InfrastructureError(f"verifiers could not serve: {error}"))


def source(name: str, args: Args, *, root: Path, key: str) -> VerifiersSource:
    """The environment of that id.

    Raises:
        ConfigError: it is not installed, its configuration is refused, or it has several seats.
    """
    return VerifiersSource(_load(name, args, root, key))


def tasks(name: str, args: Args, *, root: Path, key: str) -> Sequence[Task]:
    """The environment's tasks, named by their place.

    Raises:
        ConfigError: as `source`; or the tasks have no end and `args.size` is missing.
    """
    taskset, size = _load(name, args, root, key).taskset, args.get(SIZE)
    if size is None and not taskset.bounded:
        raise ConfigError(
            f"{key}: the tasks of verifiers:{name} have no end; set args.{SIZE} to how many are used"
        )
    rows = taskset if size is None else islice(taskset, size)
    return [
        Task(str(place), {"task": row.data.model_dump(mode="json")})
        for place, row in enumerate(rows)
    ]


def _load(name: str, args: Args, root: Path, key: str) -> Any:
    folder = str(root.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key} = 'verifiers:{name}' needs a package that is not installed ({error.name}); pip "
            "install verifiers==0.4.0 in the environment of the workers that play it"
        ) from error
    block = {word: value for word, value in args.items() if word != SIZE}
    block["taskset"] = dict(block.get("taskset") or {}) | {"id": name}
    try:
        config = resolve_env_config(block)
        seats = sorted(agent_config_fields(config))
        if len(seats) != 1:
            raise ConfigError(
                f"{key}: verifiers:{name} has the seats {', '.join(seats)}; one policy is trained, "
                "from environments with one seat"
            )
        return load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: verifiers cannot load {name!r}: {error}") from error


@asynccontextmanager
async def _key(key: str) -> AsyncIterator[str]:
    """The name of a variable that holds the attempt's key: verifiers reads keys from nowhere else.

    It keeps variables with such a name from the programs that it starts.
    """
    variable = f"ROLLBOOK_API_KEY_{abs(hash(key)):x}"
    os.environ[variable] = key
    try:
        yield variable
    finally:
        os.environ.pop(variable, None)


def _outcome(episode: Any) -> Outcome:
    """What an episode comes to: its one trace's rewards, or why there are none."""
    if episode.ok:
        (trace,) = episode.traces
        parts = {name: part.value for name, part in trace.rewards.items() if part is not None}
        return Outcome(Status.COMPLETED, reward=Reward(float(trace.reward), parts))
    errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
    detail = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
    if (cause := _budget(detail)) is not None:
        return Outcome(Status.TRUNCATED, cause=cause, detail=detail)
    raise InfrastructureError(detail)


def _budget(detail: str) -> str | None:
    """The budget that the gateway said was used up, if that is what ended the episode."""
    for text in re.findall(r"upstream 400: (\{.*?\}\})", detail):
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError):
            continue
        if error.get("code") == "context_length_exceeded":
            return "context"
        if error.get("code") == "rollout_budget_exhausted":
            return str(error["param"])
    return None
