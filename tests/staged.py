"""A rehearsed run whose groups are played by the product's own transactions, workflow by workflow."""

import random
from dataclasses import asdict
from typing import Any

from domain.config import RunConfig
from domain.ids import fold
from domain.rollouts import Status
from storage import runs, versions
from storage.attempts import Ending
from storage.database import Ledger
from tests.chaos.crash_world import Activity, Cluster, Workflow
from tests.rehearsal import Rehearsal


class Staged(Rehearsal):
    """The trainer's transactions, and around them a cluster that delivers, starts and samples.

    Versions go the product's way, through the outbox.
    """

    def __init__(self, ledger: Ledger, config: RunConfig, *, seed: int = 0, **more: Any) -> None:
        super().__init__(ledger, config, **more)
        self.cluster = Cluster(ledger, random.Random(seed))

    def serve(self, version: int) -> None:
        self.record_weights(version)
        self.ledger.call(versions.publish, self.run, self.epoch, version)
        while self.ledger.call(versions.served, self.run) != version:
            self.cluster.relay()

    def close_run(self) -> None:
        """Close it, and let its workflows end."""
        self.ledger.call(runs.close, self.run, self.epoch, "closed")
        self.cluster.relay()

    def hand_over_and_deliver(self) -> None:
        """Every group that may begin has its workflow."""
        self.hand_over()
        while self.value(
            "SELECT count(*) FROM outbox WHERE run_id = %s AND done_at IS NULL", self.run
        ):
            self.cluster.relay()

    def workflow(self, group: int) -> Workflow:
        """The live workflow of a group."""
        (found,) = (
            w
            for w in self.cluster.workflows.values()
            if (w.start.run, w.start.group, w.closed) == (self.run, group, False)
        )
        return found

    def begin_rollout(self, group: int, sample: int, *, segments: int = 1) -> Activity:
        """Start a rollout and sample so many segments of three tokens each."""
        workflow = self.workflow(group)
        activity = workflow.live[sample]
        if activity.fence is None:
            self.cluster.start(workflow, activity)
        for _ in range(segments):
            self.cluster.sample(workflow, activity)
        return activity

    def end_rollout(
        self,
        group: int,
        sample: int,
        reward: float | None = 1.0,
        *,
        status: Status = Status.COMPLETED,
        cause: str | None = None,
    ) -> None:
        """Let a rollout that was begun end; its workflow sees to what follows."""
        workflow = self.workflow(group)
        ending = Ending(status=status, reward=reward, cause=cause)
        self.cluster.finish(workflow, workflow.live[sample], ending)

    def roll_out(self, group: int, *samples: int, segments: int = 1) -> None:
        """Whole rollouts, one after the other."""
        for sample in samples:
            self.begin_rollout(group, sample, segments=segments)
            self.end_rollout(group, sample, float(sample))

    def working(self) -> list[Workflow]:
        """The workflows that have something live, in the order of their keys."""
        return [w for _, w in sorted(self.cluster.workflows.items()) if w.live]

    def play(self, workflow: Workflow, activity: Activity, ending: Ending | None) -> None:
        """Start if need be, sample once, and end like this unless it ended otherwise meanwhile."""

        def alive() -> bool:
            return workflow.live.get(activity.at.sample) is activity

        if activity.fence is None:
            self.cluster.start(workflow, activity)
        if alive() and activity.segments == 0:
            self.cluster.sample(workflow, activity)
        if alive() and ending is not None:
            self.cluster.finish(workflow, activity, ending)

    def play_out(self, workflow: Workflow) -> None:
        """Let every live rollout complete."""
        for sample in sorted(workflow.live):
            activity = workflow.live.get(sample)
            if activity is not None:
                reward = float(fold(*asdict(activity.at).values()) % 3)
                self.play(workflow, activity, Ending(status=Status.COMPLETED, reward=reward))
