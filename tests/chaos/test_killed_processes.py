"""kill -9 of the processes of a running run: anywhere, at named points, frozen, and woken again."""

import signal

import pytest

from domain.failpoints import ENGINE_POINTS, LEDGER_POINTS, POINTS, ROLLOUT_POINTS
from tests.chaos.stage import Stage

pytestmark = pytest.mark.timeout(400)


def test_every_process_dies_once_and_the_run_ends_as_if_none_had(stage: Stage) -> None:
    stage.pause(0.2)
    stage.start_all()
    for step, name in enumerate(("rollouts", "workflows", "ledger", "engine")):
        stage.until_step(step)
        if name == "rollouts":
            stage.until_rollouts_run()
        stage.kill(name)
    stage.kill("trainer")
    stage.finish()
    stage.check()


TRAINER_POINTS = (
    *("c_uploaded", "c_row", "c_served", "resume_done", "restored", "h_mid", "h_done"),
    *("plan_start", "plan_mid", "plan_done", "mid_step", "optimizer", "apply_mid"),
    *("apply_done", "replay_mid", "ck_part", "ck_uploaded", "ck_mid", "ck_done"),
    *("p_uploaded", "p_loading", "p_served"),
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [1, 3])
def test_the_trainer_dies_at_each_point_in_turn(stage: Stage, every: int) -> None:
    # Re-opened members need a run that falls behind; the toy trainer's schedules have them.
    assert {*TRAINER_POINTS, "close_mid", "close_done"} == set(POINTS) - {"plan_reopen"}
    stage.begin(steps=24, checkpoint={"every": every})
    stage.start("engine", "workflows", "ledger", "rollouts")
    for point in TRAINER_POINTS:
        stage.crash("trainer", point)
    for _ in range(2):
        stage.crash("trainer", "apply_done:2")
    stage.crash("trainer", "close_mid")
    stage.crash("trainer", "close_done")
    stage.finish()
    stage.check()


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["snapshot", "stateless", "drop"])
@pytest.mark.parametrize("first", [0, 2])
def test_a_rollout_worker_dies_at_each_point(stage: Stage, recovery: str, first: int) -> None:
    # Two deaths a run: an attempt that meets a third is lost, which is no failure either.
    stage.begin(tasks={"source": f"walk:{recovery}"}, steps=4)
    stage.start("engine", "workflows", "ledger", "trainer")
    points = [*ROLLOUT_POINTS]
    assert len(points) == 4
    for count, point in enumerate(points[first : first + 2]):
        stage.crash("rollouts", f"{point}:{3 + 2 * count}")
    stage.start("rollouts")
    stage.finish()
    stage.check()
    losses = stage.value("SELECT sum(losses) FROM groups WHERE run_id = %s", stage.run)
    assert losses == 0 or recovery == "drop"


@pytest.mark.slow
def test_engines_and_ledger_workers_die_at_each_point(stage: Stage) -> None:
    stage.begin(steps=10)
    stage.start("workflows", "rollouts", "trainer", "ledger")
    for point in ENGINE_POINTS:
        stage.crash("engine", point)
    stage.start("engine")
    stage.until_step(1)
    assert set(LEDGER_POINTS) == {"load_unacknowledged", "relay_mid", "sweep_reopened"}
    for point in ("load_unacknowledged", "relay_mid:2", "relay_mid"):
        stage.crash("ledger", point)
    stage.start("ledger")
    stage.finish()
    stage.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollouts", "workflows", "ledger", "engine"])
def test_a_process_that_freezes_and_wakes_up_does_no_harm(stage: Stage, name: str) -> None:
    stage.pause(0.2)
    stage.start_all()
    stage.until_step(1)
    stage.until_rollouts_run()
    pid = stage.signal(name, signal.SIGSTOP)
    second = f"{name}-2"
    if name != "engine":  # a second one takes over while the first is frozen
        stage.start(second)
    stage.rest(6)
    stage.wake(pid)
    stage.finish()
    stage.check()


def test_a_trainer_that_wakes_up_after_a_takeover_is_fenced(stage: Stage) -> None:
    stage.pause(0.2)
    stage.start_all()
    stage.until_step(1)
    pid = stage.signal("trainer", signal.SIGSTOP)
    epoch = stage.found().epoch
    stage.start("trainer-forced")
    stage.until(lambda: stage.found().epoch > epoch, "another trainer has taken over")
    stage.until_step(2)
    stage.wake(pid)
    stage.finish()
    stage.check()
    assert "another trainer took over" in stage.log("trainer").read_text()
    assert stage.report("trainer").restarts == 0  # it stays down
    plans = stage.query("SELECT applied_epoch FROM steps WHERE run_id = %s", stage.run)
    assert {row["applied_epoch"] for row in plans} == {epoch, epoch + 1}
