"""What a rollout waits for, judged from what the ledger and Temporal show."""

from typing import Any

import pytest

from domain.waits import Activity, Queue, Workflow, of_attempt

POLLED = Queue(name="rollout-default", pollers=(("7@host", 41.0),))
HERE = (0, 0)


def judged(workflow: Workflow, *, running: int = 0, queue: Queue | None = None) -> tuple[str, str]:
    on, why, _ = of_attempt(workflow, HERE, queue, running=running, environment="default")
    return on, why


def started(**beat: Any) -> Workflow:
    activity = Activity(state="started", heartbeat_s=0.4, beat=beat, worker="7@host")
    return Workflow(status="running", activities={HERE: activity})


@pytest.mark.parametrize(
    ("beat", "on", "why"),
    [
        ({"phase": "sampling", "engine": "http://e:1", "turn": 3}, "engine", "at http://e:1"),
        (
            {"phase": "sampling", "engine_error": "no live engine holds r@4"},
            "engine",
            "no answer: no live engine holds r@4",
        ),
        ({"phase": "environment", "tools": "search", "turn": 2}, "tool", "search (turn 2)"),
        ({"phase": "environment", "tools": ""}, "environment", "environment (turn 0)"),
        ({"phase": "reset"}, "environment", "reset"),
        (
            {"phase": "program", "process": 4711, "turn": 2},
            "environment",
            "its program runs, process 4711 of 7@host (turn 2)",
        ),
        ({"phase": "verifier"}, "verifier", "reward function"),
        ({"phase": "starting"}, "rollout worker", "7@host is starting it"),
    ],
)
def test_a_running_attempt_waits_for_what_it_last_said(
    beat: dict[str, Any], on: str, why: str
) -> None:
    found, told = judged(started(**beat))
    assert found == on
    assert why in told


def test_a_phase_tells_since_when() -> None:
    assert of_attempt(
        started(phase="verifier", for_s=93.5), HERE, None, running=1, environment="default"
    )[2] == pytest.approx(93.5)


def test_a_worker_without_heartbeats_is_named() -> None:
    silent = Activity(
        state="started", heartbeat_s=20.0, beat={"phase": "verifier"}, worker="7@host"
    )
    on, why = judged(Workflow(status="running", activities={HERE: silent}))
    assert (on, why) == ("rollout worker", "7@host sends no heartbeat any more")


def test_a_queued_attempt_waits_for_a_slot_or_for_any_worker_at_all() -> None:
    queued = Workflow(
        status="running", activities={HERE: Activity(state="scheduled", scheduled_s=12.0)}
    )
    assert judged(queued, running=256)[1].startswith("every slot")
    assert "no worker polls rollout-default" in judged(queued)[1]
    assert "the last one, 7@host, polled 41 s ago" in judged(queued, queue=POLLED)[1]


def test_what_follows_a_lost_worker_is_named() -> None:
    again = Activity(state="scheduled", tries=2, last_failure="activity Heartbeat timeout")
    after = Workflow(status="running", activities={HERE: again})
    assert judged(after, running=3) == (
        "resume",
        "execution 2 follows: activity Heartbeat timeout",
    )
    on, why = judged(after)
    assert on == "rollout worker"
    assert why.startswith("no worker polls rollout-default")
    assert why.endswith("execution 2 follows: activity Heartbeat timeout")


@pytest.mark.parametrize(
    ("workflow", "on"),
    [
        (Workflow(status="unreachable"), "temporal"),
        (Workflow(status="closed"), "sweep"),
        (Workflow(status="unknown"), "sweep"),
        (Workflow(status="running", task_waits_s=9.0), "workflow worker"),
        (Workflow(status="running", task_waits_s=1.0), "workflow worker"),
        (
            Workflow(status="running", activities={HERE: Activity(state="cancelling")}),
            "cancellation",
        ),
        (Workflow(status="running", activities={HERE: Activity(state="paused")}), "paused"),
    ],
)
def test_the_platform_is_named_when_it_is_what_is_missing(workflow: Workflow, on: str) -> None:
    assert judged(workflow)[0] == on
