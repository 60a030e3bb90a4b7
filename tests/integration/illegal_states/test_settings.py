"""Settings that cannot hold together, and a run, which never goes back."""

import pytest

from storage.database import Ledger
from tests.telling_moment import DEADLINE, RUN, D, accepted, numbered, refused, run

ILLEGAL = [
    # settings that cannot hold together
    ("v1_bound", RUN + "ahead = 2"),
    ("v1_bound", RUN + "sync_every = 2"),
    ("v1_bound", RUN + "max_lag = 0"),
    ("v2_mask_span", RUN + "stale_policy = 'mask_span'"),
    ("v3_keep", RUN + "stale_policy = 'keep', allow_trajectory_loss = true"),
    ("v4_deadline", RUN + "completion = 'deadline'"),
    (
        "v4_deadline",
        RUN + "completion = 'deadline', min_members = 1, on_stragglers = 'truncate', "
        "allow_trajectory_loss = true",
    ),
    (
        "v4_members",
        RUN + "completion = 'deadline', min_members = 3, max_straggler_tokens = 8, "
        "on_stragglers = 'truncate', allow_trajectory_loss = true",
    ),
    ("v5_partial", RUN + DEADLINE + "on_stragglers = 'discard', allow_trajectory_loss = true"),
    ("v6_loss", RUN + DEADLINE + "on_stragglers = 'truncate'"),
    (
        "v7_carry_over",
        RUN + DEADLINE + "on_stragglers = 'carry_over', stale_policy = 'keep', "
        "allow_unbounded_staleness = true, estimator = 'batch'",
    ),
    (
        "v7_carry_over",
        RUN + DEADLINE + "on_stragglers = 'carry_over', stale_policy = 'keep', "
        "allow_unbounded_staleness = true, \"order\" = 'admission', overflow = 'accumulate'",
    ),
    (
        "v7_carry_over",
        RUN + DEADLINE + "on_stragglers = 'carry_over', stale_policy = 'keep', ahead = 0, "
        "allow_unbounded_staleness = true, \"order\" = 'admission', estimator = 'batch'",
    ),
    ("v8_segment", RUN + "sampling_policy = 'segment'"),
    ("v8_refill", RUN + "sampling_policy = 'segment', kv_on_limit = 'refill'"),
    ("v8_trajectory", RUN + "kv_max_staleness = 1"),
    ("v8_trajectory", RUN + "allow_reprefill = true"),
    (
        "v9_wait_ends",
        RUN + "stale_policy = 'wait', \"order\" = 'deadline', timeout_s = NULL, "
        "max_generated_tokens = NULL",
    ),
    ("v9_wait_whole", RUN + "stale_policy = 'wait', ahead = 0, overflow = 'cut'"),
    ("v9_wait_order", RUN + "stale_policy = 'wait', \"order\" = 'admission'"),
    ("v9_wait_order", RUN + "stale_policy = 'wait'"),
    ("v10_admit", RUN + "admit = 3"),
    ("v10_admit", RUN + "admit = 1, \"order\" = 'deadline'"),
    ("v10_group", RUN + "group_size = 1"),
    ("v10_group", RUN + "group_size = 1, estimator = 'rloo'"),
    ("v11_score", RUN + "has_verifier = false, truncation = 'score'"),
    (
        "v11_score",
        RUN + 'has_verifier = false, truncation_by_cause = \'{"turns": "score"}\'',
    ),
    ("v13_cut", RUN + "overflow = 'cut', \"order\" = 'deadline'"),
    ("v14_exact", RUN + "exact = 'order', checkpoint_every = 2"),
    ("v15_importance", RUN + "importance = NULL"),
    ("runs_order_check", RUN + "\"order\" = 'random'"),
    # a run never goes back
    ("never goes back", RUN + "version = 0"),
    ("never goes back", RUN + "next_step = 0"),
    ("never goes back", RUN + "trainer_epoch = 0"),
    ("never goes back", RUN + "durable_step = 0"),
    ("never goes back", RUN + "durable_step = NULL"),
    ("never goes back", RUN + "first_step = 1"),
    ("never goes back", RUN + f"config_sha256 = {D}"),
    ("version_counts", RUN + "version = 2"),
    ("durable_not_ahead", RUN + "durable_step = 2"),
    ("failed_says_why", RUN + "state = 'failed'"),
    ("runs starts as creating", run(state="'running'", durable_step="0")),
    ("runs_run_id_check", run(run_id="'No spaces'")),
    ("fork_complete", run(parent="'r1'")),
    ("fork_starts", run(parent="'r1'", forked_at="1", first_step="0")),
    ("root_starts_at_zero", run(first_step="1", next_step="1")),
    ("durable_before_work", run() + RUN + "state = 'running' WHERE run_id = 'r2'"),
]  # fmt: skip

LEGAL = [
    RUN + "ahead = 0, max_lag = 0, importance = NULL",
    RUN + "sync_every = 2, max_lag = 2",
    RUN + "stale_policy = 'mask_span', allow_trajectory_loss = true, ahead = 5",
    RUN + "stale_policy = 'keep', allow_unbounded_staleness = true, ahead = 9",
    RUN + "stale_policy = 'wait', \"order\" = 'deadline'",
    RUN + "stale_policy = 'wait', ahead = 0",
    RUN + "stale_policy = 'wait', \"order\" = 'deadline', timeout_s = NULL",
    RUN + "min_members = 9",  # mode "wait" may carry any of them
    RUN + DEADLINE + "on_stragglers = 'truncate', allow_trajectory_loss = true",
    RUN + DEADLINE + "on_stragglers = 'discard', stale_policy = 'mask_span', "
    "allow_trajectory_loss = true",
    RUN + DEADLINE + "on_stragglers = 'carry_over', stale_policy = 'keep', "
    "allow_unbounded_staleness = true, \"order\" = 'admission', estimator = 'batch'",
    RUN + "sampling_policy = 'segment', kv_max_staleness = 1",
    RUN + "sampling_policy = 'segment', kv_on_limit = 'refill', allow_reprefill = true",
    RUN + "admit = 1",
    RUN + "group_size = 1, estimator = 'mean'",
    RUN + "group_size = 1, estimator = 'batch'",
    RUN + "truncation = 'score'",
    RUN + "overflow = 'cut'",
    RUN + "exact = 'order'",
    RUN + "state = 'failed', failure = 'why'",
    RUN + "state = 'paused'",
    RUN + "trainer_epoch = 2",
    run(),
    run(parent="'r1'", forked_at="1", first_step="1", next_step="1", durable_step="1"),
    run() + RUN + "state = 'failed', failure = 'early' WHERE run_id = 'r2'",
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
