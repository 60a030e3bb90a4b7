"""A rewind in full work: the parent is closed with its history, the child publishes, then samples."""

from typing import Any

import pytest

from storage import fork, runs
from tests.chaos.stage import Stage, holder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HISTORY = {  # what has happened, in an order of its own; a close or a fork may not touch it
    "steps": "SELECT step, state, version_before, updated, weights_sha256, groups, applied_epoch "
    "FROM steps WHERE run_id = %s ORDER BY step",
    "plans": "SELECT group_id, part, gen, state, step, pos, lag FROM queue WHERE run_id = %s "
    "AND step IS NOT NULL ORDER BY step, pos",
    "finished": "SELECT group_id, sample, attempt, status, reward, member, fence FROM attempts "
    "WHERE run_id = %s AND member AND finished_at < %s ORDER BY 1, 2, 3",
    "segments": "SELECT group_id, sample, attempt, seq, fence, sampled_ids, logprobs FROM segments "
    "WHERE run_id = %s AND created_at < %s ORDER BY 1, 2, 3, 4",
    "checkpoints": "SELECT step, version, s3_prefix, state FROM checkpoints WHERE run_id = %s "
    "ORDER BY step",
    "data": "SELECT batch, content_sha256 FROM task_batches WHERE run_id = %s ORDER BY batch",
}


def history(stage: Stage, run: str, before: Any) -> dict[str, Any]:
    return {
        name: stage.query(query, *(run, before)[: query.count("%s")])
        for name, query in HISTORY.items()
    }


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_fork_keeps_its_parents_history_and_publishes_before_it_samples(
    stage: Stage, killed: bool
) -> None:
    stage.begin(steps=7, checkpoint={"every": 1, "keep": 100})
    stage.pause(0.3)
    stage.start_all()
    stage.until_step(4)
    stage.until_rollouts_run()
    if killed:
        stage.signal("trainer")
    stage.stop("trainer")
    parent = stage.run
    now = stage.value("SELECT now()")
    before = history(stage, parent, now)
    epoch = stage.ledger.call(runs.take_over, parent, holder(), lease_s=30, force=True)
    stage.run = stage.ledger.call(fork.fork, parent, epoch, 2)
    stage.pause(0.02)
    stage.start("trainer")
    stage.finish()
    stage.check()
    assert history(stage, parent, now) == before
    assert stage.ledger.call(runs.read, parent).state == "closed"
    assert stage.found().parent == parent
    first = stage.value("SELECT min(created_at) FROM segments WHERE run_id = %s", stage.run)
    served = stage.value(
        "SELECT served_at FROM policy_versions WHERE run_id = %s ORDER BY version LIMIT 1",
        stage.run,
    )
    assert served < first
    older = "SELECT count(*) FROM segments s JOIN runs r USING (run_id) WHERE run_id = %s AND "
    assert stage.value(older + "s.oldest_version < r.first_version", stage.run) == 0
