"""A toy run's world on a real ledger: everything outside the trainer, which survives its deaths.

Temporal, the workers and the engine are played here with the ledger's own transactions, and they
misbehave: rollouts fail, workers and workflows are lost, commands are delivered twice, results come
late.
"""

import random
from contextlib import suppress
from dataclasses import asdict, dataclass

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
from domain.rollouts import Segment, Status
from storage import (
    attempts,
    groups,
    outbox,
    reopen,
    segments,
    versions,
)
from storage.attempts import Ending
from storage.database import Ledger
from storage.outbox import Command
from storage.segments import Place

ENGINE = "http://engine"


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
