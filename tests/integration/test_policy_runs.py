"""Every way to treat old versions and unfinished rollouts, in a run on the real parts.

Each run is a few updates of a tiny model, whose rollouts take longer than an update.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from domain.risks import acknowledged
from domain.services import Services
from storage.database import upgrade
from storage.objects import ObjectStore
from tests.policy_runs import CACHED, Processes, Wanderer, processes

MASK = {"stale_policy": "mask_span", "allow_trajectory_loss": True}
LAG = "SELECT coalesce(max(lag), 0) FROM queue WHERE run_id = %(run)s AND state = 'trained'"
BROKEN_KV = """
SELECT count(*) FROM segments WHERE run_id = %(run)s AND newest_version - kv_version > {bound}"""
TWO_VERSIONS = """
SELECT count(*) FROM attempts WHERE run_id = %(run)s AND oldest_version < newest_version"""
STALE = "SELECT count(*) FROM attempts WHERE run_id = %(run)s AND cancel_cause = 'stale'"
EXPIRED = "SELECT count(*) FROM queue WHERE run_id = %(run)s AND state = 'expired'"


async def pause() -> None:
    await asyncio.sleep(0.4)


@pytest.fixture(scope="module")
def running(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    upgrade(services.database_url)
    ObjectStore(services).prepare()
    state: Path = tmp_path_factory.mktemp("policy-runs")
    with processes(services, state, Wanderer(pause)) as started:
        yield started


def test_wait_trains_every_group_within_the_bound(running: Processes) -> None:
    run = running.train(5, schedule={"max_lag": 2, "ahead": 2})
    assert run.value(LAG) <= 2
    assert (run.value(STALE), run.value(EXPIRED), run.value(TWO_VERSIONS)) == (0, 0, 0)
    assert all(step.metrics["staleness/slack"] >= 0 for step in run.steps)
    assert run.value("SELECT count(*) FROM steps WHERE run_id = %(run)s AND updated") == 5


def test_resubmit_sends_too_old_rollouts_back_and_counts_no_failure(running: Processes) -> None:
    schedule = {"stale_policy": "resubmit", "order": "admission", "max_lag": 1, "ahead": 1}
    run = running.train(6, schedule=schedule)
    assert run.value(LAG) <= 1
    sent_back = """SELECT count(*) FROM attempts WHERE run_id = %(run)s
        AND resubmitted_as = 'stale' AND NOT counts_as_failure"""
    assert run.value(sent_back) == run.value(
        "SELECT count(*) FROM attempts WHERE run_id = %(run)s AND resubmitted_as = 'stale'"
    )


def test_segment_with_hold_extends_old_prefixes_within_the_bound(running: Processes) -> None:
    kv = {"max_staleness": 1}
    run = running.train(
        6,
        schedule={**MASK, "max_lag": 4},
        sampling={"policy": "segment", "kv_cache": kv},
    )
    assert run.value(TWO_VERSIONS) > 0
    assert run.value(BROKEN_KV.format(bound=1)) == 0
    extended = """SELECT count(*) FROM segments WHERE run_id = %(run)s
        AND kv_version < oldest_version AND cached_prompt_tokens > 0"""
    assert run.value(extended) > 0
    told = run.rows(CACHED)
    assert [step["step"] for step in told] == list(range(6))
    assert [step["told"] for step in told] == pytest.approx([step["recorded"] for step in told])
    assert max(step["told"] for step in told) > 0


def test_segment_with_refill_follows_the_newest_version(running: Processes) -> None:
    kv = {"max_staleness": 0, "on_limit": "refill", "allow_reprefill": True}
    run = running.train(
        6,
        schedule={**MASK, "max_lag": 4},
        sampling={"policy": "segment", "kv_cache": kv},
    )
    assert run.value(TWO_VERSIONS) > 0
    assert run.value(BROKEN_KV.format(bound=0)) == 0


def test_mask_span_takes_old_tokens_out_of_the_loss(running: Processes) -> None:
    kv = {"max_staleness": 1}
    run = running.train(
        6,
        schedule={**MASK, "order": "admission", "max_lag": 0},
        sampling={"policy": "segment", "kv_cache": kv},
    )
    assert all(step.metrics.get("lag/max", 0) == 0 for step in run.steps)
    assert max(step.metrics.get("staleness/frac_masked", 0) for step in run.steps) > 0
    assert run.value(STALE) == 0


def test_keep_trains_tokens_of_any_age(
    running: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    keep = {"stale_policy": "keep", "allow_unbounded_staleness": True, "order": "admission"}
    run = running.train(6, schedule={**keep, "max_lag": 0, "ahead": 3})
    assert max(step.metrics["lag/max"] for step in run.steps) > 0
    assert (run.value(STALE), run.value(EXPIRED)) == (0, 0)
    (said,) = acknowledged(run.config)  # what it may cost was said before the first step
    assert f"run {run.config.name}: {said}" in caplog.messages


def completion(on_stragglers: str) -> dict[str, Any]:
    return {
        "size": 4,
        "completion": {
            "mode": "deadline",
            "min_members": 2,
            "max_straggler_tokens": 2,
            "on_stragglers": on_stragglers,
        },
    }


def test_deadline_truncates_stragglers_at_a_segment_boundary(running: Processes) -> None:
    run = running.train(4, groups=completion("truncate"), schedule={"allow_trajectory_loss": True})
    cut = run.rows(
        """SELECT a.policy_tokens - a.tokens_at_quorum AS used, a.policy_tokens AS tokens,
            (SELECT sum(tokens) FROM segments s WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                = (a.run_id, a.group_id, a.sample, a.attempt)) AS recorded
        FROM attempts a WHERE run_id = %(run)s AND truncation = 'group_deadline'"""
    )
    assert cut
    assert max(row["used"] for row in cut if row["used"] is not None) <= 2 + 2
    assert all(row["tokens"] == row["recorded"] for row in cut)
    members = "SELECT min(members) FROM queue WHERE run_id = %(run)s AND state = 'trained'"
    assert run.value(members) == 4


def test_deadline_discards_stragglers_into_partial_groups(running: Processes) -> None:
    run = running.train(4, groups=completion("discard"), schedule=MASK)
    sizes = run.rows("SELECT members FROM queue WHERE run_id = %(run)s AND state = 'trained'")
    assert min(row["members"] for row in sizes) < 4
    thrown = """SELECT count(*) FROM attempts WHERE run_id = %(run)s AND cancel_cause = 'deadline'
        AND NOT counts_as_failure AND resubmitted_as IS NULL"""
    assert run.value(thrown) > 0


def test_deadline_carries_tails_over_into_a_second_part(running: Processes) -> None:
    run = running.train(
        6,
        groups=completion("carry_over"),
        schedule={**MASK, "max_lag": 3},
        trainer={"estimator": "batch"},
    )
    parts = run.rows(
        """SELECT q.part, a.sample FROM queue q JOIN attempts a USING (run_id, group_id, part)
        WHERE run_id = %(run)s AND q.state = 'trained' AND a.member"""
    )
    assert {row["part"] for row in parts} == {0, 1}
    twice = """SELECT count(*) FROM (SELECT 1 FROM attempts WHERE run_id = %(run)s AND member
        GROUP BY group_id, sample HAVING count(*) > 1) AS x"""
    assert run.value(twice) == 0
