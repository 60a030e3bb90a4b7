"""A toy run on a real ledger: everything outside the trainer survives, the trainer may die anywhere.

The trainer is sixteen float64 weights whose update depends on every token byte, on their order and
on a stateful random generator, so that any lost, repeated or reordered group shows in the digest.
Temporal, the workers and the engine are played here with the ledger's own transactions, and they
misbehave: rollouts fail, workers and workflows are lost, commands are delivered twice, results come
late.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from domain.config import RunConfig
from domain.errors import Fenced
from domain.ids import fold
from domain.messages import (
    AttemptIn,
    AttemptRef,
    BeginGroup,
    CloseAttempt,
    FinishGroup,
    GroupIn,
)
from domain.rollouts import Rollout, Segment, Status, Task
from storage import (
    attempts,
    checkpoints,
    fork,
    groups,
    outbox,
    reopen,
    runs,
    segments,
    steps,
    tasks,
    versions,
)
from storage.attempts import Ending
from storage.database import Ledger, Tx
from storage.outbox import Command
from storage.segments import Place
from storage.steps import Planned, Waiting

P = ParamSpec("P")
T = TypeVar("T")
ENGINE = "http://engine"
PATIENCE = 3000  # polls without progress that count as a hang


class Crash(Exception):
    """The trainer's process ends here."""


@dataclass
class Crashes:
    """Decides where the trainer dies: by chance, or at each point once."""

    rng: random.Random
    rate: float = 0.0
    each_once: bool = False
    seen: dict[str, int] = field(default_factory=dict)
    crashed: int = 0

    def visit(self, point: str) -> None:
        first = point not in self.seen
        self.seen[point] = self.seen.get(point, 0) + 1
        if (self.each_once and first) or self.rng.random() < self.rate:
            self.crashed += 1
            raise Crash(point)


@dataclass
class Activity:
    """One execution of an attempt, in a worker."""

    at: AttemptIn
    fence: int | None = None
    version: int = 0
    tokens: int = 0
    segments: int = 0
    wanted: int = 1
    cause: str | None = None


@dataclass
class Workflow:
    """One generation of a group, in Temporal."""

    start: GroupIn
    live: dict[int, Activity]
    members: int
    closed: bool = False
    deadline: bool = False
    part0: bool = False


class Cluster:
    """Temporal, the steward, the workers and an engine. Outlives every trainer."""

    def __init__(self, ledger: Ledger, rng: random.Random, *, tail: int = 4):
        self.ledger = ledger
        self.rng = rng
        self.tail = tail
        self.workflows: dict[str, Workflow] = {}
        self.ghosts: list[Activity] = []

    def act(self) -> None:
        """Let something happen."""
        chance = self.rng.random()
        if chance < 0.2:
            self.relay()
        elif chance < 0.23:
            self.sweep()
        elif chance < 0.24:
            self.terminate()
        elif chance < 0.26:
            self.haunt()
        else:
            self.work()

    def relay(self) -> None:
        due = self.ledger.call(outbox.claim, 10)
        for command in due:
            for _ in range(2 if self.rng.random() < 0.15 else 1):
                self.deliver(command)
        if self.rng.random() < 0.9:  # else the relay dies between delivery and mark
            self.ledger.call(outbox.done, [command.id for command in due])

    def deliver(self, command: Command) -> None:
        payload = dict(command.payload)
        if command.kind == "publish":
            self.load(payload["run"], payload["version"])
            return
        if command.kind == "start_group":
            if command.key not in self.workflows:
                payload["samples"] = tuple((s, a) for s, a in payload["samples"])
                self.begin(command.key, GroupIn(**payload))
            return
        workflow = self.workflows.get(payload["workflow_id"])
        if workflow is None or workflow.closed:
            return
        if command.kind == "close_group":
            self.drain(workflow)
        elif command.kind == "cancel_sample":
            activity = workflow.live.get(payload["sample"])
            if activity is not None and activity.at.attempt == payload["attempt"]:
                activity.cause = payload["cause"]
        else:
            workflow.deadline = True
            self.settle(workflow)

    def load(self, run: str, version: int) -> None:
        self.ledger.call(versions.see_engine, run, ENGINE, 1, 64, 3600.0)
        weights = self.ledger.call(versions.weights, run, version)
        self.ledger.call(versions.acknowledge, run, ENGINE, 1, version, weights.sha256)
        self.ledger.call(versions.mark_served, run, version)

    def begin(self, key: str, start: GroupIn) -> None:
        claim = BeginGroup(
            run=start.run,
            group=start.group,
            gen=start.gen,
            workflow_id=key,
            first_execution_run_id=key,
        )
        workflow = Workflow(start, {}, start.kept, part0=start.part0_admitted)
        self.workflows[key] = workflow
        if not self.ledger.call(groups.begin, claim):
            workflow.closed = True
            return
        for sample, attempt in start.samples:
            workflow.live[sample] = self.activity(start, sample, attempt)
        self.settle(workflow)

    def activity(self, start: GroupIn, sample: int, attempt: int) -> Activity:
        at = AttemptIn(run=start.run, group=start.group, sample=sample, attempt=attempt)
        wanted = self.tail if self.rng.random() < 0.15 else 1
        return Activity(at, wanted=wanted)

    def work(self) -> None:
        """One transaction of some worker."""
        busy = [w for w in self.workflows.values() if not w.closed and w.live]
        if not busy:
            return
        workflow = self.rng.choice(busy)
        activity = self.rng.choice([workflow.live[s] for s in sorted(workflow.live)])
        chance = self.rng.random()
        if activity.fence is None:
            self.start(workflow, activity)
        elif chance < 0.04:
            self.close(workflow, activity, "infra_error", lost=True)
        elif activity.cause is not None:
            self.finish(workflow, activity, Ending(status=Status.CANCELLED))
        elif chance < 0.10:
            failure = Ending(status=Status.INFRA_ERROR, error_type="E", error="broke")
            self.finish(workflow, activity, failure)
        elif activity.segments < activity.wanted:
            self.sample(workflow, activity)
        else:
            reward = float(fold(*asdict(activity.at).values()) % 3)
            self.finish(workflow, activity, Ending(status=Status.COMPLETED, reward=reward))

    def start(self, workflow: Workflow, activity: Activity) -> None:
        started = self.ledger.call(attempts.start, activity.at, worker="w")
        activity.fence, activity.version = started.fence, started.version
        if started.ended is not None:
            self.ended(workflow, activity, started.ended)

    def sample(self, workflow: Workflow, activity: Activity) -> None:
        at, seq = activity.at, activity.segments
        ids = [fold("t", *asdict(at).values(), seq, i) % 97 for i in range(3)]
        segment = Segment(
            prompt_ids=[1] * (activity.tokens + 1),
            sampled_ids=ids,
            logprobs=[-0.5 - i / 7 for i in ids],
            finish_reason="stop",
            version=activity.version,
            kv_version=activity.version,
        )
        place = Place(seq=seq, turn=seq, chain=0, context_start=activity.tokens)
        assert activity.fence is not None
        try:
            progress = self.ledger.call(
                segments.append,
                at.run,
                at.group,
                at.sample,
                at.attempt,
                activity.fence,
                segment,
                place=place,
                engine=ENGINE,
            )
        except Fenced:
            self.ended(workflow, activity, self.ledger.call(attempts.read, at))
            return
        activity.segments += 1
        activity.tokens += 1 + len(ids)
        activity.cause = activity.cause or progress.cancel_cause

    def finish(self, workflow: Workflow, activity: Activity, ending: Ending) -> None:
        assert activity.fence is not None
        try:
            ref = self.ledger.call(attempts.finish, activity.at, activity.fence, ending)
        except Fenced:
            self.ended(workflow, activity, self.ledger.call(attempts.read, activity.at))
            return
        self.ended(workflow, activity, ref)

    def ended(self, workflow: Workflow, activity: Activity, ref: AttemptRef | None) -> None:
        if ref is not None and ref.member:
            del workflow.live[activity.at.sample]
            workflow.members += 1
            self.settle(workflow)
        elif ref is None:
            self.close(workflow, activity, None)
        else:
            self.close(workflow, activity, ref.resubmit, status=ref.status)

    def close(
        self,
        workflow: Workflow,
        activity: Activity,
        cause: str | None,
        *,
        status: str = "cancelled",
        lost: bool = False,
    ) -> None:
        at = activity.at
        answer = self.ledger.call(
            groups.close_attempt,
            CloseAttempt(
                run=at.run,
                group=at.group,
                gen=workflow.start.gen,
                sample=at.sample,
                attempt=at.attempt,
                cause=cause,
                status=status,
                lost=lost,
            ),
        )
        del workflow.live[at.sample]
        if lost and activity.fence is not None and self.rng.random() < 0.5:
            self.ghosts.append(activity)
        if answer.adopted is not None:
            workflow.members += 1
        elif answer.next_attempt is not None:
            following = self.activity(workflow.start, at.sample, answer.next_attempt)
            workflow.live[at.sample] = following
        elif answer.close is not None:
            self.drain(workflow)
            return
        self.settle(workflow)

    def settle(self, workflow: Workflow) -> None:
        """Close the group if it has enough members, or its tails have ended."""
        start = workflow.start
        carry = start.on_stragglers == "carry_over"
        if workflow.closed:
            return
        if carry and workflow.deadline and not workflow.part0 and workflow.live:
            workflow.part0 = True
            self.ledger.call(groups.finish, self.ending(workflow, part=0))
        elif workflow.members >= start.size or not workflow.live:
            self.ledger.call(groups.finish, self.ending(workflow, part=int(workflow.part0)))
            self.leave(workflow)

    def ending(self, workflow: Workflow, part: int) -> FinishGroup:
        start = workflow.start
        return FinishGroup(
            run=start.run, group=start.group, gen=start.gen, outcome="complete", part=part
        )

    def drain(self, workflow: Workflow) -> None:
        """Stop what still runs, then close."""
        for activity in list(workflow.live.values()):
            if activity.fence is not None and self.rng.random() < 0.8:
                with suppress(Fenced):
                    self.ledger.call(
                        attempts.finish,
                        activity.at,
                        activity.fence,
                        Ending(status=Status.CANCELLED),
                    )
        self.leave(workflow)

    def leave(self, workflow: Workflow) -> None:
        workflow.closed = True
        self.ghosts += [a for a in workflow.live.values() if a.fence is not None]
        workflow.live = {}

    def terminate(self) -> None:
        """A person, or a wiped Temporal, ends a workflow without a word."""
        running = [w for w in self.workflows.values() if not w.closed]
        if running:
            self.leave(self.rng.choice(running))

    def haunt(self) -> None:
        """A worker that everybody gave up sends its result."""
        if self.ghosts:
            ghost = self.ghosts.pop(self.rng.randrange(len(self.ghosts)))
            assert ghost.fence is not None
            with suppress(Fenced):
                self.ledger.call(
                    attempts.finish,
                    ghost.at,
                    ghost.fence,
                    Ending(status=Status.COMPLETED, reward=1.0),
                )

    def sweep(self) -> None:
        """Re-open groups whose workflow is gone; end attempts that were cancelled with it."""
        with self.ledger.transaction() as tx:
            lost = tx.execute(
                """
                SELECT g.run_id, g.group_id, g.gen, g.workflow_id FROM groups g WHERE g.state =
                'submitted' AND (g.begun_at IS NOT NULL OR EXISTS (SELECT 1 FROM outbox o WHERE
                o.run_id = g.run_id AND o.kind = 'start_group' AND o.key = g.workflow_id
                AND o.done_at IS NOT NULL)) ORDER BY 1, 2
                """
            ).fetchall()
        for row in lost:
            workflow = self.workflows.get(row["workflow_id"])
            if workflow is None or workflow.closed:
                self.ledger.call(
                    reopen.reopen, row["run_id"], row["group_id"], row["gen"], cause="lost"
                )


@dataclass
class Model:
    """The trainer's whole state."""

    weights: np.ndarray[Any, np.dtype[np.float64]]
    rng: np.random.Generator

    @classmethod
    def new(cls) -> "Model":
        rng = np.random.default_rng(7)
        return cls(rng.standard_normal(16), rng)

    def digest(self) -> bytes:
        return sha256(self.weights.tobytes()).digest()

    def train(self, batch: Sequence[Sequence[Rollout]]) -> bool:
        """Update on a step's groups, in order; False if they hold no usable gradient."""
        noise = self.rng.standard_normal(16)
        if all(len({r.reward for r in group}) < 2 for group in batch):
            return False
        for group in batch:
            for rollout in group:
                for segment in rollout.segments:
                    for token, logprob in zip(segment.sampled_ids, segment.logprobs, strict=True):
                        self.weights = np.tanh(
                            self.weights * 1.01 + noise * float(logprob) + int(token)
                        )
        return True


class Trainer:
    """One trainer process: restores, replays, and trains until the run ends or it crashes."""

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        store: dict[str, Any],
        config: RunConfig,
        crashes: Crashes,
        batches: int,
    ):
        self.ledger = ledger
        self.cluster = cluster
        self.store = store
        self.config = config
        self.run = config.name
        self.crashes = crashes
        self.batches = batches
        self.epoch = 0
        self.model = Model.new()
        self.position = 0

    def tx(
        self, name: str, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """One transaction, in the middle and at the end of which the process may die."""
        with self.ledger.transaction() as tx:
            answer = fn(tx, *args, **kwargs)
            self.crashes.visit(f"{name}_mid")
        self.crashes.visit(f"{name}_done")
        return answer

    def now(self) -> runs.Run:
        return self.ledger.call(runs.read, self.run)

    def start(self) -> None:
        """Create the run if need be, take it over, restore the newest checkpoint and replay."""
        with self.ledger.transaction() as tx:
            known = tx.execute("SELECT 1 FROM runs WHERE run_id = %s", (self.run,)).fetchone()
        if known is None:
            self.tx("create", runs.create, self.config, world={})
        self.epoch = self.tx("resume", runs.take_over, self.run, "t", lease_s=30, force=True)
        if self.now().state == "creating":
            self.crashes.visit("create_uploaded")
            self.tx("first", checkpoints.create_first, self.run, self.epoch, **self.first())
        found = self.ledger.call(checkpoints.newest, self.run)
        self.model = deepcopy(self.store[found.prefix])
        self.position = found.data_position["batch"]
        for step in range(found.step, self.now().next_step):
            plan = self.ledger.call(steps.read_plan, self.run, step)
            assert plan is not None
            updated = self.compute(plan)
            self.tx(
                "replay",
                steps.verify_replay,
                self.run,
                self.epoch,
                step,
                updated=updated,
                weights_sha256=self.model.digest(),
            )

    def first(self) -> dict[str, Any]:
        model = Model.new()
        self.store[f"{self.run}/0"] = model
        return {
            "weights_sha256": model.digest(),
            "manifest_key": "w0",
            "weights_bytes": 1,
            "probe": None,
            "prefix": f"{self.run}/0",
            "manifest_sha256": model.digest(),
            "bytes": 1,
            "data_position": {"batch": 0},
            "rng": {},
            "world": {},
        }

    def train(self, until: int | None = None) -> None:
        """Poll, plan, compute, apply and checkpoint until the run ends, or step `until` is next."""
        polls = 0
        while until is None or self.now().next_step < until:
            polls += 1
            assert polls < PATIENCE, f"{self.run} hangs at step {self.now().next_step}"
            self.publish()
            self.hand_over()
            step = self.now().next_step
            self.crashes.visit("plan_start")
            plan = self.tx("plan", steps.plan, self.run, self.epoch, 0, step)
            if isinstance(plan, Waiting):
                if plan.kind == "end":
                    return
                for _ in range(4):
                    self.cluster.act()
                continue
            polls = 0
            self.crashes.visit("mid_step")
            updated = self.compute(plan)
            self.crashes.visit("optimizer")
            self.tx(
                "apply",
                steps.apply,
                self.run,
                self.epoch,
                step,
                updated=updated,
                weights_sha256=self.model.digest(),
                cause=None if updated else "no usable gradient" if plan.rows else "empty",
                metrics={},
                record={},
            )
            if (step + 1) % self.config.checkpoint.every == 0:
                self.checkpoint()

    def publish(self) -> None:
        run = self.now()
        served = self.ledger.call(versions.served, self.run)
        if served is not None and run.version - served < self.config.schedule.sync_every:
            return
        self.tx(
            "uploaded",
            versions.record_weights,
            self.run,
            self.epoch,
            run.version,
            manifest_key=f"w{run.version}",
            bytes=1,
            probe=None,
        )
        self.tx("publish", versions.publish, self.run, self.epoch, run.version)
        while self.ledger.call(versions.state, self.run, run.version) != "served":
            self.cluster.act()
        self.crashes.visit("served")

    def hand_over(self) -> None:
        while True:
            done = self.tx("hand", tasks.hand_over, self.run, self.epoch, 0)
            if done.need_batch is None:
                return
            # A restored position lags behind: what the ledger has already is drawn again, and must
            # be the same.
            for batch in range(self.position, done.need_batch + 1):
                self.register(batch)
            self.position = done.need_batch + (done.need_batch < self.batches)

    def register(self, batch: int) -> None:
        if batch >= self.batches:
            self.tx("end", tasks.end_of_data, self.run, self.epoch, 0, self.batches)
            return
        size = self.config.tasks.batch_size - (batch == self.batches - 1)  # a short last batch
        drawn = [Task(f"t{batch}.{i}", {"n": i}) for i in range(size)]
        self.tx(
            "register",
            tasks.register_batch,
            self.run,
            self.epoch,
            0,
            batch,
            drawn,
            {"batch": batch + 1},
        )

    def compute(self, plan: Planned) -> bool:
        rows = [(row.group, row.part) for row in plan.rows]
        batch = self.ledger.call(segments.members, self.run, rows) if rows else []
        return self.model.train(batch)

    def checkpoint(self) -> None:
        run = self.now()
        prefix = f"{self.run}/{run.next_step}/{self.epoch}"
        self.store[prefix] = deepcopy(self.model)
        self.crashes.visit("checkpoint_uploaded")
        self.tx(
            "checkpoint",
            checkpoints.record,
            self.run,
            self.epoch,
            step=run.next_step,
            version=run.version,
            prefix=prefix,
            manifest_sha256=self.model.digest(),
            bytes=1,
            data_position={"batch": self.position},
            rng={},
            world={},
        )

    def close(self) -> None:
        self.checkpoint()
        self.tx("close", runs.close, self.run, self.epoch, "closed")

    def fork(self, step: int) -> str:
        return self.tx("fork", fork.fork, self.run, self.epoch, step)
