"""What a killed worker of this machine had in hand is tried again at once, not after its silence."""

import os
import subprocess
import sys

from activities.mourning import Mourning
from domain import holders
from tests.steward_scene import Scene, running, until


def dead() -> str:
    """The name of a process of this place that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return holders.here().replace(f":{os.getpid()}", f":{ended.pid}")


async def test_attempts_of_a_dead_worker_are_told_to_temporal_once(scene: Scene) -> None:
    scene.run.hand_over()
    mourning = Mourning(scene.ledger, scene.client)
    async with scene.workers():
        await scene.relay.deliver()
        await until(lambda: running(scene.run) == 8)
        await mourning.report()  # "test" is no process of this place: nobody can say
        assert fences(scene) == {1}
        scene.run.do("UPDATE attempts SET worker = %s WHERE group_id = 1", dead())
        await mourning.report()
        # Long before the heartbeat's time-out of a minute.
        await until(lambda: fences(scene, group=1) == {2})
        scene.run.do("UPDATE attempts SET worker = %s WHERE group_id = 1", holders.here())
        await mourning.report()
        assert fences(scene, group=1) == {2}
        assert fences(scene, group=0) == {1}
        scene.rollouts.gate.set()
        for group in range(4):
            await scene.handle(group).result()
    assert set(scene.run.states().values()) == {"queue"}
    lost = scene.run.value("SELECT count(*) FROM attempts WHERE counts_as_failure OR attempt > 0")
    assert lost == 0


def fences(scene: Scene, *, group: int | None = None) -> set[int]:
    rows = scene.run.rows(
        "SELECT fence FROM attempts WHERE state = 'running' AND group_id = coalesce(%s, group_id)",
        group,
    )
    return {row["fence"] for row in rows}
