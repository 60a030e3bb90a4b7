"""What a rollout or a run waits for, told from what the ledger and Temporal show: pure rules.

A cause has a short name that programs and saved queries can match (`on`), and a sentence for people.

    relay · workflow worker · rollout worker · engine · tool · environment · verifier · resume ·
    cancellation · sweep · trainer · hold · publish · steward · paused
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from domain.messages import WORKFLOW_QUEUE, rollout_queue

BEAT_LOST_S = 15.0
"""Seconds without a heartbeat after which a worker is not believed alive (it beats every half)."""

TAKEN_S = 5.0
"""Seconds within which a live worker with a free slot takes a task."""

PART_S = 10.0
"""Seconds that a part of the system may take before it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One thing that waits."""

    what: str  # "run", or "group G · sample S · attempt A"
    on: str
    detail: str
    seconds: float | None = None
    workflow_id: str | None = None
    group: int | None = None
    sample: int | None = None
    attempt: int | None = None
    turn: int = 0
    tokens: int = 0
    version: int | None = None
    phase: str | None = None  # what the execution last said it does
    heartbeat_s: float | None = None  # seconds since it said so


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """An attempt as Temporal sees it."""

    state: Literal["scheduled", "started", "cancelling", "paused"]
    tries: int = 1
    scheduled_s: float = 0.0  # seconds since it was scheduled
    heartbeat_s: float | None = None  # seconds since the last heartbeat, or since it started
    beat: Mapping[str, Any] | None = None
    worker: str = ""
    last_failure: str = ""

    @property
    def heard(self) -> bool:
        """Whether its worker was heard lately."""
        return (
            self.state == "started"
            and self.heartbeat_s is not None
            and self.heartbeat_s <= BEAT_LOST_S
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """A group's workflow as Temporal sees it."""

    status: Literal["running", "closed", "unknown", "unreachable"]
    task_waits_s: float | None = None  # a workflow task that nobody has taken
    activities: Mapping[tuple[int, int], Activity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Who polls a task queue."""

    name: str
    pollers: tuple[tuple[str, float], ...] = ()  # identity, seconds since it polled; newest first

    def nobody(self) -> str:
        """That nobody takes tasks, and who did last."""
        if not self.pollers:
            return f"no worker polls {self.name}"
        who, ago = self.pollers[0]
        return f"no worker takes tasks of {self.name}; the last one, {who}, polled {ago:.0f} s ago"


def of_attempt(
    workflow: Workflow, key: tuple[int, int], queue: Queue | None, *, running: int, environment: str
) -> tuple[str, str, float | None]:
    """Cause, sentence and seconds of an attempt whose start was delivered.

    Args:
        workflow: its group's.
        key: sample and attempt.
        queue: pollers of the rollout queue; None: Temporal did not say.
        running: attempts of the run whose workers are heard now.
        environment: names the queue.
    """
    match workflow.status:
        case "unreachable":
            return "temporal", "Temporal does not answer; heartbeats are known only there", None
        case "closed" | "unknown":
            gone = "has closed" if workflow.status == "closed" else "is unknown to Temporal"
            return "sweep", f"its workflow {gone}; the steward opens the group again", None
    if workflow.task_waits_s is not None and workflow.task_waits_s > TAKEN_S:
        waited = workflow.task_waits_s
        return "workflow worker", f"no workflow worker takes its task ({WORKFLOW_QUEUE})", waited
    found = workflow.activities.get(key)
    if found is None:
        return "workflow worker", "its workflow is about to start or settle it", None
    if found.state == "cancelling":
        return "cancellation", "it was told to stop and has not yet", found.heartbeat_s
    if found.state == "paused":
        return "paused", "a person paused it in Temporal; unpause it there", found.scheduled_s
    if found.state == "scheduled":
        return _scheduled(found, queue, running=running, environment=environment)
    return _started(found)


def _scheduled(
    found: Activity, queue: Queue | None, *, running: int, environment: str
) -> tuple[str, str, float | None]:
    lost = ""
    if found.tries > 1:
        lost = f"execution {found.tries} follows: {found.last_failure or 'its worker was lost'}"
    if running:
        name = rollout_queue(environment)
        busy = f"every slot of the workers of {name} is taken ({running} attempts run)"
        return ("resume", lost, None) if lost else ("rollout worker", busy, found.scheduled_s)
    return "rollout worker", nobody(queue, environment) + (lost and f"; {lost}"), found.scheduled_s


def nobody(queue: Queue | None, environment: str) -> str:
    """That no worker takes attempts of an environment, and the remedy."""
    told = (queue or Queue(name=rollout_queue(environment))).nobody()
    return f"{told}; start `rollbook worker rollouts --environment {environment}`"


def _started(found: Activity) -> tuple[str, str, float | None]:
    if found.heartbeat_s is not None and found.heartbeat_s > BEAT_LOST_S:
        return "rollout worker", f"{found.worker} sends no heartbeat any more", found.heartbeat_s
    beat = found.beat or {}
    seconds = beat.get("for_s")
    match beat.get("phase"):
        case "sampling":
            engine = beat.get("engine") or "an engine"
            trouble = beat.get("engine_error")
            told = f"no answer: {trouble}" if trouble else f"its request is at {engine}"
            return "engine", f"{told} (turn {beat.get('turn', 0)})", seconds
        case "environment" if beat.get("tools"):
            return "tool", f"{beat['tools']} (turn {beat.get('turn', 0)})", seconds
        case "verifier":
            return "verifier", "the reward function has not answered", seconds
        case "program":
            where = f"process {beat.get('process')} of {found.worker}"
            return "environment", f"its program runs, {where} (turn {beat.get('turn', 0)})", seconds
        case None | "starting":
            return "rollout worker", f"{found.worker} is starting it", seconds
        case phase:
            return "environment", f"{phase} (turn {beat.get('turn', 0)})", seconds
