"""kill -9 of the processes of a running run: anywhere, at named points, frozen, and woken again."""

import asyncio
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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("every", "ranks"), [(1, 1), (3, 1), (2, 2)])
def test_the_trainer_dies_at_each_point_in_turn(stage: Stage, every: int, ranks: int) -> None:
    """Of several ranks the first that gets there dies, and its world with it."""
    assert {*TRAINER_POINTS, "close_mid", "close_done", "plan_reopen"} == set(POINTS)
    tasks = {"batch_size": 2 // ranks}  # of each rank, so that there are as many in all
    stage.begin(steps=24, tasks=tasks, trainer={"ranks": ranks}, checkpoint={"every": every})
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
def test_the_trainer_dies_while_it_sends_back_members_that_grew_too_old(stage: Stage) -> None:
    lag = {"order": "admission", "stale_policy": "resubmit", "ahead": 1, "max_lag": 1}
    stage.begin(steps=12, schedule=lag)
    stage.hang_one()  # its siblings finish, and are too old when it has been sampled again
    stage.start("engine", "workflows", "ledger", "rollouts")
    stage.crash("trainer", "plan_reopen")
    stale = (
        "SELECT count(*) FROM attempts WHERE run_id = %s AND resubmitted_as = 'stale' AND member"
    )
    assert stage.value(stale, stage.run) == 0  # it died inside the transaction
    stage.start("trainer")
    stage.finish()
    stage.check()
    sent_back = "SELECT count(*) FROM groups WHERE run_id = %s AND gen > 0"
    assert stage.value(sent_back, stage.run) >= 1


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
    for point in ("load_unacknowledged", "relay_mid:2", "relay_mid"):
        stage.crash("ledger", point)
    stage.pause(0.3)
    stage.start("ledger")
    stage.until_rollouts_run()
    terminate_a_group(stage)
    stage.crash("ledger", "sweep_reopened")
    assert set(LEDGER_POINTS) == {"load_unacknowledged", "relay_mid", "sweep_reopened"}
    stage.start("ledger")
    stage.pause(0.02)
    stage.finish()
    stage.check()
    again = "SELECT sum(losses) FROM groups WHERE run_id = %s AND gen > 0"
    assert stage.value(again, stage.run) > 0


def terminate_a_group(stage: Stage) -> None:
    """End a workflow without a word to the ledger; the sweep finds it."""

    async def terminate(workflow_id: str) -> None:
        await (await stage.client()).get_workflow_handle(workflow_id).terminate("a test")

    (row,) = stage.query(
        "SELECT workflow_id FROM groups WHERE run_id = %s AND state = 'submitted' "
        "AND begun_at IS NOT NULL ORDER BY group_id DESC LIMIT 1",
        stage.run,
    )
    asyncio.run(terminate(row["workflow_id"]))


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
