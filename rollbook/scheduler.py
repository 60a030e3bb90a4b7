"""`RolloutScheduler`: rollouts for a training loop of one's own, durable by its run name.

    with RolloutScheduler(objective, source, EnginePublisher("model"), run="mine", …) as scheduler:
        for batch in scheduler.tasks(batches):
            packed = scheduler(state, batch)       # rows to train on, and old_logprobs
            …update state…; state.updates += 1
            scheduler.applied()
            save(state, scheduler.state_dict())

The groups of a step are fixed in the ledger before the loop sees them, and what the loop made of
them is booked there. A process that dies is started again under the same run name: it loads its own
checkpoint, gets the same rows for every step since, and goes on. docs/own-loop.md tells the rest.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from activities.chat import Chat
from activities.play import rehearse
from domain import sources
from domain.config import RunConfig
from domain.environments import Source, task_ids
from domain.errors import ConfigError, EngineError, Fenced, LedgerError, RunNotFound
from domain.rollouts import Task
from domain.services import Services
from rollbook import objective, own_config, own_run, preflight, publishing
from rollbook.companions import Companions
from rollbook.connect import STATE
from rollbook.handed import Handed
from rollbook.objective import Objective, State
from rollbook.own_run import OwnRun
from rollbook.publishers import Publisher
from rollbook.record import SchedulerRecord
from trainer import folders
from trainer.feed import Feed

FORMAT = 1
"""Of `state_dict`."""

log = logging.getLogger(__name__)


class RolloutScheduler:
    """Samples rollouts ahead of a loop and hands them over step by step. One thread uses it."""

    def __init__(
        self,
        objective: Objective,
        source: Source | str,
        weights: Publisher,
        *,
        width: int,
        rows: int,
        tasks: Callable[[Any], Sequence[Task]] = task_ids,
        groups: int = 4,
        oversample: int = 0,
        admit: int | None = None,
        max_lag: int = 1,
        ahead: int = 1,
        sync_every: int = 1,
        max_attempts: int = 3,
        timeout: float | None = None,
        estimator: str = "group",
        truncation: str = "mask",
        support_capacity: int | None = None,
        log: Callable[[SchedulerRecord], None] | None = None,
        run: str,
        services: Services | None = None,
        batch_size: int | None = None,
        on_reopen: Literal["adopt", "cancel"] = "adopt",
        exact: Literal["bits", "order"] = "bits",
        model: str | Path | None = None,
        sampling: Mapping[str, Any] | None = None,
        budget: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        seed: int = 0,
        state: str | Path = STATE,
        force: bool = False,
    ) -> None:
        """Check everything, bring the services up and take the run, if it exists.

        Args:
            objective: scores packed rows; says how off-policy tokens are corrected.
            source: what plays a task; an object, or its `module:name`.
            weights: puts weights into the engines; `EnginePublisher` for rollbook's own.
            width: tokens of a packed row.
            rows: packed rows of a step; groups that do not fit are cut.
            tasks: the tasks of a batch.
            groups: rollouts of a task's group.
            oversample: spare rollouts of each fresh group.
            admit: groups of a batch that are trained; default all.
            max_lag: trainer version minus that of a rollout's oldest token, at training.
            ahead: batches sampled ahead of the one in training; 0 is synchronous.
            sync_every: publish when the served version is so far behind.
            max_attempts: failures of one rollout that abandon its group.
            timeout: seconds from submission until a rollout is cancelled.
            estimator: of the advantages: group, mean, rloo or batch.
            truncation: of truncated rollouts: mask, score, zero or drop.
            support_capacity: kept ids a row may hold; filtered sampling needs top_k * width.
            log: told each step that this process booked.
            run: its name, under which everything is found again.
            services: addresses; None starts or joins the local stack in `state`.
            batch_size: tasks of the largest batch; default those of the first.
            on_reopen: rollouts that still run when the loop is started again: keep or cancel them.
            exact: what a replay must reproduce: the weights, or only the groups and their order,
                where kernels are not deterministic; then take `state_dict()` after every step.
            model: folder of config.json and tokenizer, for a publisher of one's own.
            sampling: how tokens are drawn: the `[sampling]` table of a configuration file.
            budget: limits of a rollout: `[budget]`.
            engine: the built-in engine: `[engine]`.
            seed: of the sampler's random numbers.
            state: folder of the local stack, of caches and logs.
            force: take the run from a process that still holds it.

        Raises:
            ConfigError: names the setting, the value and the remedy.
            RunHeld: another process holds the run.
        """
        located = own_config.locate(source)
        folder, dtype = publishing.model_of(weights, model)
        self._objective, self._publisher, self._log = objective, weights, log
        self._located, self._model = located, folder
        self._force, self._size = force, batch_size

        def configure(size: int) -> RunConfig:
            return own_config.build(
                run,
                located,
                model=folder,
                batch_size=size,
                groups={
                    "size": groups,
                    "oversample": oversample,
                    "admit": admit,
                    "max_attempts": max_attempts,
                    "timeout": timeout,
                },
                schedule={
                    "ahead": ahead,
                    "sync_every": sync_every,
                    "max_lag": max_lag,
                    "on_reopen": on_reopen,
                },
                trainer={
                    "width": width,
                    "rows": rows,
                    "estimator": estimator,
                    "truncation": truncation,
                    "support_capacity": support_capacity,
                    "importance": objective.importance,
                    "exact": exact,
                },
                sampling=sampling or {},
                budget=budget or {},
                engine=engine or {},
                dtype=dtype,
                seed=seed,
            )

        self._configure = configure
        provisional = configure(batch_size or admit or 1)
        sources.check(located.source, provisional)
        folders.check_context(folder, provisional)
        self.name = run
        self._feed = Feed(tasks, ahead=ahead)
        self._step = self._version = 0
        self._handed: Handed | None = None
        self._run: OwnRun | None = None
        self._begun = False
        self._companions: Companions | None = Companions(services, Path(state))
        try:
            publishing.check_engines(weights, self._companions.services)
            preflight.check_engine(provisional, own=not self._companions.services.engines)
            if (recorded := own_run.recorded(self._companions.services, run)) is not None:
                self._take(recorded)
        except BaseException:
            self._companions.close()
            raise

    def tasks(self, dataset: Any) -> Iterator[Any]:
        """The batches of a data set, in order, from where the run stands; hand each to the scheduler.

        It reads `ahead` batches in front of what it yields, so that their rollouts begin, and skips
        what is trained: give the whole data set again after a restart, all epochs as one iterable.

        Raises:
            DataChanged: the data is shorter than what was trained.
        """
        return self._feed.read(dataset)

    def __call__(self, state: State, batch: Any) -> dict[str, Any]:
        """The rows of the next step, with `old_logprobs` of the weights as they are.

        Waits for rollouts. Arrays are those of `trainer.packing`, `[rows, width]`; an empty or
        fully masked step has no `response_mask` set. The same state gets the same arrays again.

        Raises:
            LedgerError: the state is not that of this step, or the step before was not applied.
            DataChanged: the batch is not the one that was drawn at this place.
            EngineError: the engines do not take the weights; the run has failed with that.
            RunStopped, SourceBroken: the run was ended from outside.
            Fenced: another process has taken the run over.
        """
        if self._handed is not None:
            raise LedgerError(
                f"step {self._handed.plan.step} of run {self.name} was handed out and not applied; "
                "call scheduler.applied() after the update"
            )
        drawn = self._feed.put(self._step, batch)
        owner = self._open(drawn)
        if not self._begun:
            owner.begin(state.weights)
            self._begun = True
        try:
            plan, replayed = owner.plan(self._step, state.updates, lambda: state.weights)
        except EngineError as error:
            owner.stop("failed", f"{type(error).__name__}: {error}")
            raise
        planned = owner.rollouts(plan)
        rows = planned.pack(owner.config, plan.version_before)
        proximal, apart = objective.proximal(self._objective, state, rows, plan.version_before)
        figures = planned.figures(owner.config, rows, plan.version_before) | apart
        self._version = plan.version_before
        self._handed = Handed.of(plan, rows, replayed=replayed, metrics=figures, state=state)
        return {**rows, "old_logprobs": proximal}

    def image(self, digest: Sequence[int]) -> bytes:
        """The file of an image in the rows that were handed out.

        Args:
            digest: its row of `image_sha256`.

        Raises:
            LedgerError: no step was handed out yet, or nobody stored such an image.
            ObjectError: the store does not give it.
        """
        if self._run is None:
            raise LedgerError("no step was handed out; call scheduler(state, batch) first")
        return self._run.image(bytes(digest).hex())

    def applied(
        self,
        *,
        updated: bool = True,
        digest: bytes | None = None,
        metrics: Mapping[str, float] | None = None,
        state: State | None = None,
    ) -> None:
        """Book the step that was handed out, or compare it with what it made before.

        Args:
            updated: whether the weights changed; `state.updates` was counted up then.
            digest: sha256 of the weights, where the publisher computes none.
            metrics: the loop's own, into the record.
            state: the state after the step, where the loop makes a new one.

        Raises:
            LedgerError: nothing was handed out, or `updates` does not fit.
            ReplayDiverged: the step made other weights than before.
            Fenced: another process has taken the run over; nothing was booked.
        """
        handed, owner = self._handed, self._run
        if handed is None or owner is None:
            raise LedgerError("no step was handed out; call scheduler(state, batch) first")
        done = handed.done(
            self.name, self._publisher, state, updated=updated, digest=digest, metrics=metrics or {}
        )
        if handed.replayed:
            owner.verify(handed.plan, done)
            log.info("replayed step %d of run %s", handed.plan.step, self.name)
        else:
            booked = owner.apply(handed.plan, done)
            if self._log is not None:
                self._log(SchedulerRecord.of(booked))
        self._handed, self._step, self._version = (
            None,
            handed.plan.step + 1,
            handed.version(updated),
        )
        self._feed.drop(self._step)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands; keep it in the loop's own checkpoint, with its weights.

        Steps before it count as trained in the ledger from now on. Older ones stay usable: every
        plan since the run's beginning can be handed out again.
        """
        state = {
            "format": FORMAT,
            "run": self.name,
            "step": self._step,
            "version": self._version,
        }
        if self._run is not None and self._begun:
            self._run.note_state(self._step, self._version, state)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where `state_dict` was taken; the steps since then are handed out again as they were.

        Raises:
            ConfigError: it is of another run, or of another format.
            RunNotFound: the ledger does not have the run, or not as far as that.
        """
        if state.get("format") != FORMAT or state.get("run") != self.name:
            raise ConfigError(
                f"this state is of run {state.get('run')!r}, format {state.get('format')!r}; run "
                f"{self.name!r} needs its own, format {FORMAT}"
            )
        step = int(state["step"])
        known = -1 if self._run is None else self._run.read().next_step
        if step > max(known, 0):
            raise RunNotFound(
                f"the state stands before step {step} of run {self.name!r}, but the ledger has "
                f"{'no such run' if known < 0 else f'only {known} steps'}; give the ledger that it "
                "was trained with (ROLLBOOK_DATABASE_URL, or state=), or start a new run"
            )
        self._handed, self._step, self._version = None, step, int(state["version"])
        self._feed.start(step)

    def close(self) -> None:
        """Cancel what is in flight, durably, and stop what was started. The source stays open."""
        companions, self._companions = self._companions, None
        if companions is None:
            return
        try:
            if self._run is not None:
                self._run.close(finished=self._handed is None and self._feed.ended_at == self._step)
        except Fenced as error:
            log.warning("run %s is not ours any more: %s", self.name, error)
        finally:
            if self._run is not None:
                self._run.release()
            companions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, drawn: Sequence[Task]) -> OwnRun:
        """The run, created for batches like this one if it is new."""
        if self._companions is None:
            raise LedgerError(f"the scheduler of run {self.name} is closed")
        if self._run is None:
            config = self._configure(self._size or len(drawn))
            chat = Chat.open(self._model, renderer=config.model.renderer)
            rehearse(self._located.source, drawn, config=config, chat=chat)
            self._take(own_run.create(self._companions.services, config))
            assert self._run is not None
        return self._run

    def _take(self, recorded: RunConfig) -> None:
        """Hold the run, and start what samples for it."""
        size = self._size or recorded.tasks.batch_size
        own_config.check_unchanged(recorded, self._configure(size))
        assert self._companions is not None
        self._companions.start(recorded, self._located)
        self._run = OwnRun(
            self._companions.services,
            recorded,
            self._publisher,
            self._feed,
            model=self._model,
            watch=self._companions.check,
            force=self._force,
        )
