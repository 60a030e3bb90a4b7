"""Drive a `HarnessSource`: a program beside the gateway, then its verifier.

    the program                                         the rollout
    exits 0                                             completed
    exits otherwise, after a budget refused it          truncated, with the cause
    goes on long after a budget ended its sampling      ended; truncated, with the cause
    exits otherwise, and the gateway died under it      lost: sampled again, no failure
    exits otherwise                                     agent_error
    cannot be started, or never called the gateway      infra_error

All but the last and the lost are judged by the verifier. No process of the program is left when it
is judged, nor when the attempt is cancelled.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx
import psycopg

from activities.chat import Chat
from activities.programs import Program, never_started, running, tail
from activities.transcripts import last_conversation
from activities.turns import Failed
from activities.verdicts import as_reward, verdict
from activities.whole import whole
from domain.config import RunConfig
from domain.environments import HarnessSource, Outcome, RolloutView
from domain.errors import SourceBroken
from domain.rollouts import Reward, Status, Task
from domain.text import clean
from storage import scratch
from storage.sessions import Past, Seen

LOOK_EVERY_S = 1.0
GOES_ON_S = 30.0
"""Seconds that a program gets to finish when nothing more will be sampled for it."""

PATIENCE_S = 60.0
"""Seconds for which the ledger is waited for where nothing can be decided without it."""

OUTPUT_LIMIT = 65_536
"""Characters of a program's output that a verifier sees."""


@runtime_checkable
class ProgramRecorder(Protocol):
    """What a rollout needs whose program samples at the gateway."""

    @property
    def base_url(self) -> str:
        """The gateway's OpenAI base URL for this rollout."""

    @property
    def api_key(self) -> str:
        """The rollout's own key there."""

    def progress(self, phase: str, **facts: Any) -> None:
        """Shown in the Temporal UI."""

    async def look(self) -> Seen:
        """What the gateway recorded so far.

        Raises:
            CancelledError, Failed: the rollout is over, whatever its program does.
            OperationalError: the ledger is out of reach.
        """

    async def past(self) -> Past:
        """All that the gateway recorded."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an attempt's program works; removed with the attempt."""

    root: Path

    @property
    def work(self) -> Path:
        """Its working folder."""
        return self.root / "work"

    @property
    def task(self) -> Path:
        """The task, as JSON."""
        return self.root / "task.json"

    @property
    def rollout(self) -> Path:
        """What a verifier command is told, as JSON."""
        return self.root / "rollout.json"

    @property
    def output(self) -> Path:
        """What the program printed."""
        return self.root / "output.txt"


class HarnessRollout:
    """One rollout of a harness."""

    def __init__(
        self,
        source: HarnessSource,
        task: Task,
        recorder: ProgramRecorder,
        config: RunConfig,
        chat: Chat,
    ) -> None:
        self._source = source
        self._task = task
        self._recorder = recorder
        self._config = config
        self._chat = chat
        self._seen = Seen(ours=True)

    async def run(self) -> Outcome:
        """Run the program and its verifier to the end.

        Raises:
            CancelledError: the attempt was cancelled; nothing of the program is left.
            SourceBroken: the command needs what the task does not have.
        """
        try:
            await self._look(PATIENCE_S)
            if self._seen.segments:
                raise Failed("the worker died, and a program cannot be taken up again", lost=True)
            with ExitStack() as stack:  # closed in a thread, whoever leaves it how
                make = partial(stack.enter_context, scratch.folder("harness"))
                root, cancelled = await whole(asyncio.to_thread(make))
                try:
                    if cancelled:
                        raise asyncio.CancelledError
                    return await self._play(Place(root))
                finally:
                    await whole(asyncio.to_thread(stack.close))
        except Failed as failure:
            return Outcome(
                Status.INFRA_ERROR,
                detail=failure.detail,
                turns=self._seen.turns,
                lost=failure.lost,
            )

    async def _play(self, place: Place) -> Outcome:
        await asyncio.to_thread(self._lay_out, place)
        incarnation = await self._incarnation()
        if incarnation is None:
            raise Failed(f"the gateway {self._recorder.base_url} does not answer", lost=True)
        argv = [self._argument(word) for word in self._source.command]
        access = {
            "OPENAI_BASE_URL": self._recorder.base_url,
            "OPENAI_API_BASE": self._recorder.base_url,
            "OPENAI_API_KEY": self._recorder.api_key,
        }
        env = {**self._source.env, **self._variables(place), **access}
        async with running(argv, folder=place.work, env=env, output=place.output) as program:
            self._recorder.progress("program", process=program.pid)
            code = await self._end_of(program)
        await self._look(PATIENCE_S)
        status, cause, detail = await self._judge(place, code, incarnation)
        view = await self._view(place)
        self._recorder.progress("verifier")
        reward = await self._reward(place, view)
        return Outcome(
            status,
            reward=reward,
            cause=cause,
            detail=detail,
            turns=self._seen.turns,
            metrics=view.metrics,
        )

    async def _end_of(self, program: Program) -> int | None:
        """The exit status; None: it was ended, since nothing more would be sampled for it."""
        refused_at: float | None = None
        while (code := await program.ended(LOOK_EVERY_S)) is None:
            await self._look()
            # A program may answer a context that is too long with a shorter one.
            over = self._seen.refused not in (None, "context", "images")
            refused_at = (refused_at or time.monotonic()) if over else None
            if refused_at is not None and time.monotonic() - refused_at > GOES_ON_S:
                return None
        return code

    async def _look(self, patience_s: float = 0.0) -> None:
        """Learn how the attempt stands; while the ledger is away the program goes on."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                self._seen = await self._recorder.look()
            except psycopg.OperationalError:
                if not patience_s:
                    return
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                return

    async def _judge(
        self, place: Place, code: int | None, incarnation: str
    ) -> tuple[Status, str | None, str]:
        printed = tail(place.output)
        said = f"the program {self._source.command[0]!r} exited with {code}: {printed}"
        if code is not None and never_started(code, place.output):
            raise Failed(clean(printed))
        if code != 0 and self._seen.refused is not None:
            return Status.TRUNCATED, self._seen.refused, clean(said)
        if code != 0 and await self._incarnation() != incarnation:
            raise Failed(clean(f"the gateway died under the program; {said}"), lost=True)
        if not self._seen.segments:
            raise Failed(
                clean(
                    f"nothing was sampled: the program must send its requests to OPENAI_BASE_URL; {said}"
                )
            )
        if code != 0:
            return Status.AGENT_ERROR, None, clean(said)
        return Status.COMPLETED, None, ""

    # ------------------------------------------------------------ what the program gets

    def _lay_out(self, place: Place) -> None:
        if self._source.workdir is None:
            place.work.mkdir()
        else:
            template = Path(self._config.root) / self._source.workdir
            if not template.is_dir():
                raise Failed(f"HarnessSource.workdir: there is no folder {template}")
            shutil.copytree(template, place.work, symlinks=True)
        place.task.write_text(
            json.dumps({"id": self._task.id, "data": dict(self._task.data)}), encoding="utf-8"
        )
        place.output.touch()

    def _argument(self, word: str) -> str:
        """An argument that is exactly `{name}` stands for that entry of the task."""
        if not (word.startswith("{") and word.endswith("}") and word[1:-1].isidentifier()):
            return word
        name = word[1:-1]
        value = self._task.id if name == "id" else self._task.data.get(name)
        if value is None:
            raise SourceBroken(
                f"the command has the argument {word}, which task {self._task.id!r} does not have; "
                f"it has id, {', '.join(sorted(self._task.data))}"
            )
        return value if isinstance(value, str) else json.dumps(value)

    def _variables(self, place: Place) -> dict[str, str]:
        return {
            "ROLLBOOK_TASK_FILE": str(place.task),
            "ROLLBOOK_TASK_ID": self._task.id,
            "ROLLBOOK_MODEL": self._config.name,
        }

    async def _incarnation(self) -> str | None:
        """Which process the gateway is; None: it does not answer."""
        url = httpx.URL(self._recorder.base_url).copy_with(path="/health")
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:
                return str((await http.get(url)).json()["incarnation"])
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    # ------------------------------------------------------------ the verdict

    async def _view(self, place: Place) -> RolloutView:
        messages = last_conversation(await self._recorder.past(), self._chat)
        text = await asyncio.to_thread(place.output.read_bytes)
        return RolloutView(
            self._task,
            messages,
            turns=self._seen.turns,
            generated_tokens=self._seen.tokens,
            folder=str(place.work),
            output=clean(text[-OUTPUT_LIMIT:].decode("utf-8", "replace")),
        )

    async def _reward(self, place: Place, view: RolloutView) -> Reward:
        verify = self._source.verify
        if callable(verify):
            where = f"the verifier {getattr(verify, '__qualname__', verify)!r}"
            return as_reward(await verdict(where, verify, view, self._task), where)
        return await self._ask_command(verify, place, view)

    async def _ask_command(self, command: Sequence[str], place: Place, view: RolloutView) -> Reward:
        """The reward that a verifier program prints on its last line."""
        told = {
            "messages": view.messages,
            "turns": view.turns,
            "generated_tokens": view.generated_tokens,
            "output": view.output,
        }
        place.rollout.write_text(json.dumps(told), encoding="utf-8")
        where = f"the verifier {command[0]!r}"
        printed, complaints = place.root / "verdict.txt", place.root / "complaints.txt"
        env = {
            **self._source.env,
            **self._variables(place),
            "ROLLBOOK_ROLLOUT_FILE": str(place.rollout),
        }
        argv = [self._argument(word) for word in command]
        async with running(
            argv, folder=place.work, env=env, output=printed, errors=complaints
        ) as program:
            while (code := await program.ended(LOOK_EVERY_S)) is None:
                await self._look()
        if code != 0:
            raise Failed(clean(f"{where} exited with {code}: {tail(complaints)}"))
        lines = tail(printed).splitlines()
        return as_reward(_verdict_of(lines[-1] if lines else "", where), where)


def _verdict_of(line: str, where: str) -> object:
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise Failed(
            clean(
                f"{where} printed {line!r:.200} last; it must print a number or "
                '{"value": number, "components": {...}}'
            )
        ) from error
    if isinstance(value, Mapping):
        parts = value.get("components") or {}
        if not isinstance(parts, Mapping):
            raise Failed(f"{where} printed components that are no object")
        found: Any = value.get("value")
        return None if found is None else Reward(found, parts)
    return value
