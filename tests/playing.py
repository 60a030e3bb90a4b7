"""Everything around a trainer, played on the ledger's own transactions by one thread.

Relay, workflows, rollout workers and engine in one: it delivers the outbox, answers each group with
rollouts, and loads versions from the object store as an engine would, probe included. By default
what a sample says depends on its task and index alone, so that two runs of one configuration admit
the same groups, however often their trainers die.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from domain.config import RunConfig
from domain.errors import Fenced
from domain.ids import fold
from domain.messages import AttemptIn, BeginGroup, Closing, FinishGroup
from domain.rollouts import Segment, Status, Task
from domain.services import Services
from storage import attempts, groups, manifests, outbox, segments, versions
from storage.attempts import Ending
from storage.database import Ledger, Tx
from storage.objects import ObjectStore
from storage.outbox import Command
from storage.segments import Place

ENGINE = "http://played"
Answer = tuple[Segment, Ending]


def configuration(name: str, folder: Path, **sections: Any) -> RunConfig:
    """A run on a tiny model over 40 tasks of three digits, written to `folder`."""
    rows = [json.dumps({"id": f"t{i}", "prompt": f"{7 * i % 1000:03d}="}) for i in range(40)]
    (folder / "tasks.jsonl").write_text("\n".join(rows))
    table: dict[str, Any] = {
        "name": name,
        "steps": 4,
        "root": str(folder),
        "tasks": {"source": "a:b", "dataset": "tasks.jsonl", "batch_size": 2},
        "groups": {"size": 4, "timeout": 600.0},
        "schedule": {"order": "dataset", "stale_policy": "resubmit", "max_lag": 2, "ahead": 1},
        "model": {"tiny": {"dim": 16, "layers": 1, "heads": 2, "max_positions": 32}},
        "budget": {"max_generated_tokens": 4, "max_context_tokens": 16},
        "trainer": {"width": 32, "rows": 2, "estimator": "mean", "lr": 1e-2, "threads": 1},
        "checkpoint": {"every": 2},
    }
    for key, value in sections.items():
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    return RunConfig.parse(table)


def scripted(task: Task, sample: int, version: int) -> Answer:
    """Tokens, log-probabilities and reward that follow from task and sample alone."""
    prompt = ["0123456789=".index(c) for c in task.data["prompt"]]
    ids = [fold("played", task.id, sample, i) % 12 for i in range(1 + fold(task.id, sample) % 4)]
    logprobs = [-2.0 - fold("logprob", task.id, sample, i) % 1000 / 1000 for i in range(len(ids))]
    reward = fold("reward", task.id, sample) % 5 / 4
    return Segment(prompt, ids, logprobs, "stop", version), Ending(
        status=Status.COMPLETED, reward=reward
    )


def constant(task: Task, sample: int, version: int) -> Answer:
    """As `scripted`, but every member earns the same: nothing can be learnt."""
    segment, _ = scripted(task, sample, version)
    return segment, Ending(status=Status.COMPLETED, reward=0.5)


class Fleet:
    """Plays until the context ends; what went wrong in its thread is raised there."""

    def __init__(
        self,
        services: Services,
        scratch: Path,
        *,
        answer: Callable[[Task, int, int], Answer] = scripted,
        serves: bool = True,
        plays: bool = True,
        slots: int = 8,
        on_load: Callable[[Path, manifests.Manifest], None] | None = None,
    ) -> None:
        self.ledger = Ledger.open(services.database_url, pool=2, application="fleet", patience_s=20)
        self.store = ObjectStore(services)
        self.scratch, self.answer, self.on_load = scratch, answer, on_load
        self._slots = slots
        """Versions that the engine holds at once."""
        self._deaf = {"publish": not serves, "start_group": not plays}
        self.abandoned: set[int] = set()
        """Groups that are abandoned instead of answered."""
        self.held: set[int] = set()
        """Groups whose attempts start and go on until `release`."""
        self._kept: list[tuple[str, Mapping[str, Any]]] = []
        self._released: set[int] = set()
        self.loaded: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._broken: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(20)
        self.ledger.close()
        if self._broken is not None:
            raise self._broken

    def release(self, group: int) -> None:
        """Play a group that was held to its end."""
        self.held.remove(group)
        self._released.add(group)

    def _play(self) -> None:
        try:
            while not self._over.wait(0.02):
                for kept in [k for k in self._kept if k[1]["group"] in self._released]:
                    self._kept.remove(kept)
                    self._to_its_end(*kept)
                while commands := self.ledger.call(self._claim):
                    for command in commands:
                        self._obey(command)
        except Exception as error:  # noqa: BLE001
            self._broken = error

    def broken(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._broken is not None

    def _claim(self, tx: Tx) -> list[Command]:
        commands = [c for c in outbox.claim(tx) if not self._deaf.get(c.kind)]
        outbox.done(tx, [c.id for c in commands])
        return commands

    def _obey(self, command: Command) -> None:
        match command.kind:
            case "start_group":
                self._group(command.run, command.key, command.payload)
            case "publish":
                self._load(command.run, int(command.payload["version"]))

    def _group(self, run: str, key: str, g: Mapping[str, Any]) -> None:
        begin = BeginGroup(
            run=run, group=g["group"], gen=g["gen"], workflow_id=key, first_execution_run_id=key
        )
        if self.ledger.call(groups.begin, begin):
            self._to_its_end(run, g)

    def _to_its_end(self, run: str, g: Mapping[str, Any]) -> None:
        outcome: Closing = "abandoned" if g["group"] in self.abandoned else "complete"
        held = g["group"] in self.held  # once: it may be released meanwhile
        if outcome == "complete":
            for sample, attempt in g["samples"]:
                i = AttemptIn(run=run, group=g["group"], sample=sample, attempt=attempt)
                self._attempt(i, held=held)
        if held:
            self._kept.append((run, g))
            return
        finish = FinishGroup(run=run, group=g["group"], gen=g["gen"], outcome=outcome)
        self.ledger.call(groups.finish, finish)

    def _attempt(self, i: AttemptIn, *, held: bool) -> None:
        started = self.ledger.call(attempts.start, i, worker="played")
        if started.ended is not None:
            return
        if held:
            return
        segment, ending = self.answer(started.task, i.sample, started.version)

        def record(tx: Tx) -> None:
            place = Place(seq=0, turn=0, chain=0, context_start=0)
            key = (i.run, i.group, i.sample, i.attempt, started.fence)
            segments.append(tx, *key, segment, place=place, engine=ENGINE)

        try:
            self.ledger.call(record)
            self.ledger.call(attempts.finish, i, started.fence, ending)
        except Fenced:
            return  # cancelled meanwhile

    def _load(self, run: str, version: int) -> None:
        weights = self.ledger.call(versions.weights, run, version)
        folder = self.scratch / f"{run}-{version}"
        manifest = manifests.fetch(
            self.store, weights.manifest_key, folder, sha256=weights.sha256.hex()
        )
        if self.on_load is not None:
            self.on_load(folder, manifest)
        self.ledger.call(versions.see_engine, run, ENGINE, 1, self._slots, 3600.0)
        self.ledger.call(versions.acknowledge, run, ENGINE, 1, version, weights.sha256)
        self.loaded.append(version)
        self.ledger.call(versions.mark_served, run, version)
