"""States the ledger must refuse, each by the rule meant for it, and states it must accept.

One run at a telling moment: step 0 is trained, so version 1 is served; of batch 1 group 2 is
admitted and group 3 is being sampled (sample 0 runs, sample 1 queues); groups 4 and 5 are
submitted, 6 and 7 registered. Each case is tried on it and rolled back.
"""

import secrets
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import conninfo, sql

from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration

D = "decode(repeat('ab', 32), 'hex')"  # some digest
E = "decode(repeat('cd', 32), 'hex')"  # another


@pytest.fixture(scope="module")
def moment(postgres_url: str, ledger_template: str) -> Iterator[Ledger]:
    name = f"illegal_{secrets.token_hex(4)}"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(ledger_template)
            )
        )
    ledger = Ledger.open(conninfo.make_conninfo(postgres_url, dbname=name), pool=2)
    run = Rehearsal(ledger, configuration()).begin()
    run.hand_over()
    run.complete(0)
    run.complete(1)
    run.planned()
    run.apply()
    run.serve(1)
    run.checkpoint()
    run.hand_over()
    run.complete(2)
    run.start(3, sample=0)
    run.register(3)
    assert run.states() == {
        0: "trained",
        1: "trained",
        2: "queue",
        3: "submitted",
        4: "submitted",
        5: "submitted",
        6: "registered",
        7: "registered",
    }
    yield ledger
    ledger.close()
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


RUN = "UPDATE runs SET "
FINISH = "UPDATE attempts SET finished_at = now(), "
S0 = " WHERE group_id = 3 AND sample = 0"  # running, fence 1, pinned to version 1
S1 = " WHERE group_id = 3 AND sample = 1"  # queued
G = "UPDATE groups SET "
Q = "UPDATE queue SET "
WITHDRAW = Q + "state = 'expired', cause = 'stale_member', closed_step = 1 WHERE group_id = 2; "
STEP1 = (
    "INSERT INTO steps(run_id, step, version_before, state, planned_epoch) "
    "VALUES ('r1', 1, 1, 'planned', 1); "
)
PLAN2 = STEP1 + Q + "state = 'planned', step = 1, pos = 0, lag = 0 WHERE group_id = 2; "
DEADLINE = "completion = 'deadline', min_members = 1, max_straggler_tokens = 8, "
FREE = "workflow_id = NULL, begun_at = NULL"


def segment(**columns: str) -> str:
    """A segment of group 3 sample 0 with two tokens; columns replace its good values."""
    row = {
        "run_id": "'r1'",
        "group_id": "3",
        "sample": "0",
        "attempt": "0",
        "seq": "0",
        "turn": "0",
        "chain": "0",
        "context_start": "0",
        "prompt_tokens": "1",
        "prompt_delta": "'\\x01000000'",
        "tokens": "2",
        "sampled_ids": "'\\x0100000002000000'",
        "logprobs": "'\\x0000000000000000'",
        "version_spans": "'{1,2}'",
        "oldest_version": "1",
        "newest_version": "1",
        "kv_version": "1",
        "finish_reason": "'stop'",
        "engine_id": "'e'",
        "fence": "1",
    } | columns
    return f"INSERT INTO segments({', '.join(row)}) VALUES ({', '.join(row.values())}); "


def attempt(**columns: str) -> str:
    """A second attempt at group 3 sample 0."""
    row = {
        "run_id": "'r1'",
        "group_id": "3",
        "sample": "0",
        "attempt": "1",
        "gen": "0",
        "submitted_version": "1",
    } | columns
    return f"INSERT INTO attempts({', '.join(row)}) VALUES ({', '.join(row.values())}); "


def queued(**columns: str) -> str:
    """An admission of group 3."""
    row = {
        "run_id": "'r1'",
        "group_id": "3",
        "part": "0",
        "gen": "0",
        "share": "0",
        "oldest_version": "1",
        "chain_lengths": "'{8}'",
        "members": "2",
    } | columns
    return f"INSERT INTO queue({', '.join(row)}) VALUES ({', '.join(row.values())}); "


def group(**columns: str) -> str:
    """An eighth group, at a free place."""
    row = {
        "run_id": "'r1'",
        "group_id": "8",
        "batch": "3",
        "share": "0",
        "pos": "2",
        "task_id": "'t'",
        "task": "'{}'",
    } | columns
    return f"INSERT INTO groups({', '.join(row)}) VALUES ({', '.join(row.values())}); "


def run(**columns: str) -> str:
    """A second run, copied from the first."""
    row = {
        "run_id": "'r2'",
        "config": "config",
        "config_sha256": "config_sha256",
        "seed": "0",
        "batch_size": "2",
        "admit": "2",
        "group_size": "2",
        "importance": "'5.0'",
    } | columns
    return f"INSERT INTO runs({', '.join(row)}) SELECT {', '.join(row.values())} FROM runs; "


OK = "status = 'completed', reward = 1.0, chain_lengths = '{8}'"

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
    # groups
    ("groups starts as registered", group(state="'complete'")),
    ("illegal group transition", G + "state = 'complete' WHERE group_id = 6"),
    (
        "illegal group transition",
        G + "state = 'abandoned', closed_cause = 'x', closed_step = 1 WHERE group_id = 2",
    ),
    (
        "illegal group transition",
        G + "state = 'abandoned', closed_cause = 'x', closed_step = 1 WHERE group_id = 4; "
        "UPDATE groups SET state = 'submitted', gen = 1, closed_cause = NULL, closed_step = NULL "
        "WHERE group_id = 4",
    ),
    ("withdraw the queue row", G + "state = 'submitted', gen = 1 WHERE group_id = 2"),
    ("gen must grow", WITHDRAW + G + "state = 'submitted' WHERE group_id = 2"),
    ("gen must grow", WITHDRAW + G + "state = 'submitted', gen = 2 WHERE group_id = 2"),
    ("gen must grow", G + f"state = 'registered', {FREE} WHERE group_id = 3"),
    (
        "gen must grow",
        G + f"state = 'registered', gen = 1, {FREE} WHERE group_id = 4; "
        "UPDATE groups SET gen = 0 WHERE group_id = 4",
    ),
    (
        "without quorum",
        WITHDRAW + G + "state = 'submitted', gen = 1, begun_at = now() WHERE group_id = 2",
    ),
    ("submitted_known", G + "state = 'submitted' WHERE group_id = 6"),
    ("submitted_known", G + "workflow_id = NULL WHERE group_id = 3"),
    ("registered_free", G + "workflow_id = 'w' WHERE group_id = 6"),
    ("deadline_after_quorum", G + "deadline_reached_at = now() WHERE group_id = 3"),
    ("closed_says_why", G + "state = 'cancelled' WHERE group_id = 6"),
    ("closed_says_why", G + "closed_cause = 'x', closed_step = 1 WHERE group_id = 3"),
    ("groups_run_id_submitted_version_fkey", G + "submitted_version = 9 WHERE group_id = 3"),
    ("groups_run_id_batch_share_fkey", group(batch="4")),
    ("groups_run_id_batch_share_pos_key", group(pos="1")),
    (
        "groups_workflow_id_key",
        G + "workflow_id = (SELECT workflow_id FROM groups WHERE group_id = 4) WHERE group_id = 3",
    ),
    ("task_batches_check", "UPDATE task_batches SET groups = 3 WHERE batch = 3"),
    # attempts
    ("attempts starts as submitted", attempt(state="'running'", pinned_version="1", sample="9")),
    ("one_live_attempt", attempt()),
    ("member_scorable", "UPDATE attempts SET member = true, chain_lengths = '{8}'" + S0),
    (
        "member_scorable",
        FINISH + "state = 'finished', status = 'infra_error', member = true, chain_lengths = '{8}'"
        + S0,
    ),
    (
        "member_scorable",
        FINISH + "state = 'finished', status = 'completed', reward = 1, member = true" + S0,
    ),
    ("reward_finite", "UPDATE attempts SET reward = 1.0" + S0),
    ("reward_finite", FINISH + "state = 'finished', status = 'completed', reward = 'NaN'" + S0),
    ("reward_finite", FINISH + "state = 'finished', status = 'completed', reward = '-inf'" + S0),
    ("reward_finite", FINISH + "state = 'finished', status = 'infra_error', reward = 0" + S0),
    (
        "scored",
        FINISH + "state = 'finished', status = 'completed', member = true, chain_lengths = '{8}'"
        + S0,
    ),
    ("ended", "UPDATE attempts SET status = 'completed'" + S0),
    ("ended", "UPDATE attempts SET state = 'finished'" + S0),
    ("ended", "UPDATE attempts SET state = 'finished', status = 'cancelled'" + S0),
    ("ended", FINISH + "state = 'running'" + S0),
    ("ends once", "UPDATE attempts SET state = 'running' WHERE group_id = 2"),
    ("ends once", "UPDATE attempts SET status = 'agent_error' WHERE group_id = 2"),
    ("runs_under_a_version", "UPDATE attempts SET state = 'running'" + S1),
    ("are fixed", "UPDATE attempts SET fence = 0" + S0),
    ("are fixed", "UPDATE attempts SET state = 'submitted'" + S0),
    ("are fixed", "UPDATE attempts SET pinned_version = 0" + S0),
    ("are fixed", "UPDATE attempts SET submitted_version = 1" + S0),
    (
        "a cancelled attempt cannot join",
        FINISH + f"state = 'finished', {OK}, member = true, cancel_cause = 'stale'" + S0,
    ),
    ("attempts_cancel_cause_check", "UPDATE attempts SET cancel_cause = 'mood'" + S0),
    (
        "truncated_says_why",
        FINISH + "state = 'finished', status = 'truncated'" + S0,
    ),
    ("truncated_says_why", "UPDATE attempts SET truncation = 'turns'" + S0),
    (
        "resubmitted_not_member",
        "UPDATE attempts SET resubmitted_as = 'stale' WHERE group_id = 2 AND sample = 0",
    ),
    ("resubmitted_not_member", "UPDATE attempts SET resubmitted_as = 'stale'" + S0),
    ("failure_kind", "UPDATE attempts SET counts_as_failure = true" + S0),
    (
        "failure_kind",
        FINISH + "state = 'finished', status = 'cancelled', resubmitted_as = 'stale', "
        "counts_as_failure = true" + S0,
    ),
    (
        "failure_kind",
        FINISH + "state = 'finished', status = 'cancelled', surplus = true, "
        "counts_as_failure = true" + S0,
    ),
    (
        "failure_kind",
        FINISH + "state = 'lost', status = 'infra_error', counts_as_failure = true" + S0,
    ),
    ("loss_kind", FINISH + "state = 'lost', status = 'cancelled'" + S0),
    ("part_of_member", "UPDATE attempts SET part = 0" + S0),
    ("version_order", "UPDATE attempts SET oldest_version = 1, newest_version = 0" + S0),
    ("version_order", "UPDATE attempts SET oldest_version = 1" + S0),
    ("attempts_run_id_pinned_version_fkey", "UPDATE attempts SET pinned_version = 9" + S1),
    (
        "one_member",
        attempt(group_id="2") + FINISH
        + f"state = 'finished', {OK}, member = true WHERE group_id = 2 AND attempt = 1",
    ),
    # segments
    ("not running under this fence", segment(sample="1")),
    ("not running under this fence", segment(fence="0")),
    ("version that is not registered", segment(newest_version="2", version_spans="'{1,1,2,1}'")),
    ("does not extend its chain", segment(context_start="2")),
    ("does not extend its chain", segment() + segment(seq="1", context_start="4")),
    ("does not extend its chain", segment() + segment(seq="1", chain="1", context_start="3")),
    ("lengths", segment(tokens="3", version_spans="'{1,3}'")),
    ("lengths", segment(logprobs="'\\x00000000'")),
    ("spans", segment(version_spans="'{1,1}'")),
    ("spans", segment(version_spans="'{0,2}'")),
    ("spans", segment(version_spans="'{1}'")),
    ("spans", segment(oldest_version="1", newest_version="0", version_spans="'{1,2}'")),
    (
        "spans",
        segment(
            kv_version="1", oldest_version="0", newest_version="0", version_spans="'{0,2}'"
        ),
    ),
    ("cached", segment(cached_prompt_tokens="2")),
    ("starts_with_prompt", segment(prompt_tokens="0", prompt_delta="''")),
    *(
        (f'null value in column "{array}"', segment(**{array: "NULL"}))
        for array in ("prompt_delta", "sampled_ids", "logprobs")
    ),
    ("support", segment(support_ids="'\\x01000000'")),
    ("support", segment(support_ids="'\\x01000000'", support_counts="'\\x01000000'")),
    # queue
    ("queue starts as admitted", queued(state="'trained'", step="0", pos="5", lag="0")),
    ("queue starts as admitted", STEP1 + queued(state="'planned'", step="1", pos="0", lag="0")),
    ("queue_once", queued(group_id="0", gen="1")),
    ("queue_once", queued(group_id="2", gen="1")),
    ("illegal queue transition", STEP1 + Q + "state = 'applied', step = 1, pos = 0, lag = 0 "
     "WHERE group_id = 2"),
    ("illegal queue transition", PLAN2 + Q + "state = 'cut', cause = 'rows', closed_step = 1, "
     "step = NULL, pos = NULL, lag = NULL WHERE group_id = 2"),
    ("illegal queue transition", PLAN2 + Q + "state = 'admitted', step = NULL, pos = NULL, "
     "lag = NULL WHERE group_id = 2"),
    ("illegal queue transition", Q + "state = 'applied' WHERE group_id = 0"),
    ("illegal queue transition", WITHDRAW + Q + "state = 'admitted', cause = NULL, "
     "closed_step = NULL WHERE group_id = 2"),
    ("bound for ever", PLAN2 + Q + "pos = 1 WHERE group_id = 2"),
    ("bound for ever", PLAN2 + Q + "step = 0, pos = 7 WHERE group_id = 2"),
    ("written once", Q + "chain_lengths = '{9}' WHERE group_id = 2"),
    ("written once", Q + "oldest_version = 0 WHERE group_id = 2"),
    ("written once", Q + "members = 1 WHERE group_id = 2"),
    ("bound", Q + "state = 'planned' WHERE group_id = 2"),
    ("bound", Q + "step = 0, pos = 7, lag = 0 WHERE group_id = 2"),
    ("queue_lag_check", STEP1 + Q + "state = 'planned', step = 1, pos = 0, lag = -1 "
     "WHERE group_id = 2"),
    ("left_says_why", Q + "state = 'cut' WHERE group_id = 2"),
    ("left_says_why", Q + "cause = 'rows', closed_step = 1 WHERE group_id = 2"),
    ("queue_place", PLAN2 + queued() + Q + "state = 'planned', step = 1, pos = 0, lag = 0 "
     "WHERE group_id = 3"),
    ("queue_members_check", queued(members="0")),
    # steps
    ("steps starts as planned", "INSERT INTO steps(run_id, step, version_before, state, "
     "planned_epoch, updated, groups, weights_sha256, applied_at, cause) "
     f"VALUES ('r1', 1, 1, 'applied', 1, false, 0, {D}, now(), 'x')"),
    ("illegal step transition", "UPDATE steps SET state = 'planned'"),
    ("illegal step transition", f"UPDATE steps SET weights_sha256 = {D}"),
    ("illegal step transition", "UPDATE steps SET groups = 3"),
    ("illegal step transition", STEP1 + f"UPDATE steps SET state = 'durable', updated = false, "
     f"cause = 'x', groups = 0, weights_sha256 = {D}, applied_at = now() WHERE step = 1"),
    ("applied_known", STEP1 + "UPDATE steps SET state = 'applied' WHERE step = 1"),
    ("applied_known", STEP1 + "UPDATE steps SET state = 'applied', updated = true, groups = 2, "
     "applied_at = now() WHERE step = 1"),
    ("applied_known", STEP1 + "UPDATE steps SET updated = true WHERE step = 1"),
    ("empty_makes_nothing", STEP1 + "UPDATE steps SET state = 'applied', updated = true, "
     f"groups = 0, weights_sha256 = {D}, applied_at = now() WHERE step = 1"),
    ("no_update_says_why", STEP1 + "UPDATE steps SET state = 'applied', updated = false, "
     f"groups = 0, weights_sha256 = {D}, applied_at = now() WHERE step = 1"),
    ("steps_pkey", STEP1 + STEP1),
    ("step_shares_check", "UPDATE step_shares SET state = 'failed'"),
    ("step_shares_run_id_step_fkey", "INSERT INTO step_shares(run_id, step, share, epoch, state) "
     "VALUES ('r1', 5, 0, 1, 'planned')"),
    # versions, engines, checkpoints
    ("sha256_check", "UPDATE policy_versions SET weights_sha256 = 'short'"),
    ("policy_version_check", "UPDATE attempts SET kv_version = -1" + S0),
    ("never goes back and keeps", "UPDATE policy_versions SET state = 'loading'"),
    ("never goes back and keeps", f"UPDATE policy_versions SET weights_sha256 = {D}"),
    ("never goes back and keeps", "UPDATE policy_versions SET weights_key = 'elsewhere'"),
    ("policy_versions_check", "INSERT INTO policy_versions(run_id, version, weights_sha256, state, "
     f"trainer_epoch) VALUES ('r1', 2, {D}, 'uploaded', 1)"),
    ("policy_versions_check1", "INSERT INTO policy_versions(run_id, version, weights_sha256, state, "
     f"trainer_epoch, weights_key) VALUES ('r1', 2, {D}, 'served', 1, 'k')"),
    ("policy_versions_check2", "UPDATE policy_versions SET held_since = now()"),
    ("engine_versions_run_id_engine_id_fkey", "INSERT INTO engine_versions(run_id, engine_id, "
     f"version, incarnation, weights_sha256) VALUES ('r1', 'nobody', 1, 1, {D})"),
    ("engines_max_resident_check", "UPDATE engines SET max_resident = 0"),
    ("checkpoints_bytes_check", "UPDATE checkpoints SET bytes = 0"),
    ("checkpoints_run_id_version_fkey", "UPDATE checkpoints SET version = 9 WHERE step = 1"),
    ("checkpoints_run_id_s3_prefix_key", "UPDATE checkpoints SET s3_prefix = 'same'"),
    # the rest
    ("set_aside_says_why", "UPDATE outbox SET refusals = 1, set_aside_at = now()"),
    ("outbox_kind_check", "INSERT INTO outbox(run_id, kind, key) VALUES ('r1', 'mail', 'k')"),
    ("outbox_run_id_kind_key_key", "INSERT INTO outbox(run_id, kind, key) "
     "SELECT run_id, kind, key FROM outbox"),
    ("snapshots_run_id_group_id_sample_attempt_fkey", "INSERT INTO snapshots VALUES "
     "('r1', 3, 0, 7, 1, '{}')"),
    ("shares_data_end_check", "UPDATE shares SET data_end = -1"),
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
    group(),
    G + "state = 'quarantined', closed_cause = 'x', closed_step = 1 WHERE group_id = 6; "
    "UPDATE groups SET state = 'registered', closed_cause = NULL, closed_step = NULL "
    "WHERE group_id = 6",
    G + "state = 'cancelled', closed_cause = 'surplus', closed_step = 1 WHERE group_id = 6",
    G + "state = 'expired', closed_cause = 'max_stale', closed_step = 1 WHERE group_id = 4",
    G + f"state = 'registered', gen = 1, {FREE} WHERE group_id = 3",
    G + "quorum_at = now(), deadline_reached_at = now() WHERE group_id = 3",
    WITHDRAW + G + "state = 'submitted', gen = 1 WHERE group_id = 2",
    WITHDRAW + G + "state = 'expired', closed_cause = 'max_stale', closed_step = 1 "
    "WHERE group_id = 2",
    WITHDRAW + queued(group_id="2", gen="1"),
    FINISH + f"state = 'finished', {OK}, member = true" + S0,
    FINISH + "state = 'finished', status = 'truncated', truncation = 'turns', member = true, "
    "chain_lengths = '{}'" + S0,
    FINISH + "state = 'finished', status = 'truncated', truncation = 'group_deadline', "
    "member = true, chain_lengths = '{8}', cancel_cause = 'deadline'" + S0,
    FINISH + "state = 'finished', status = 'agent_error', reward = 0, member = true, "
    "chain_lengths = '{8}'" + S0,
    FINISH + "state = 'finished', status = 'infra_error', resubmitted_as = 'infra_error', "
    "counts_as_failure = true" + S0,
    FINISH + "state = 'finished', status = 'cancelled', cancel_cause = 'stale', "
    "resubmitted_as = 'stale'" + S0,
    FINISH + "state = 'lost', status = 'infra_error', resubmitted_as = 'infra_error'" + S0,
    FINISH + "state = 'finished', status = 'cancelled', surplus = true" + S0,
    "UPDATE attempts SET cancel_cause = 'stale'" + S0 + "; " + attempt(),
    "UPDATE attempts SET state = 'running', pinned_version = 1, fence = 1" + S1,
    "UPDATE attempts SET fence = 2" + S0,
    segment(),
    segment() + segment(seq="1", turn="1", context_start="3"),
    segment() + segment(seq="1", turn="1", context_start="3", prompt_tokens="0", prompt_delta="''"),
    segment() + segment(seq="1", turn="1", chain="1"),
    segment(oldest_version="0", version_spans="'{0,1,1,1}'", kv_version="0"),
    segment(tokens="0", sampled_ids="''", logprobs="''", version_spans="'{}'"),
    segment(support_ids="'\\x01000000'", support_counts="'\\x0100000000000000'"),
    PLAN2,
    PLAN2 + Q + "state = 'applied' WHERE group_id = 2",
    Q + "state = 'cut', cause = 'rows', closed_step = 1 WHERE group_id = 2",
    queued() + queued(part="1"),
    STEP1 + "UPDATE steps SET state = 'applied', updated = false, cause = 'empty', groups = 0, "
    f"weights_sha256 = {D}, applied_at = now() WHERE step = 1",
    STEP1 + "UPDATE steps SET state = 'applied', updated = true, groups = 2, "
    f"weights_sha256 = {E}, applied_at = now() WHERE step = 1; "
    "UPDATE steps SET state = 'durable' WHERE step = 1",
    "UPDATE policy_versions SET state = 'draining' WHERE version = 0",
    "INSERT INTO policy_versions(run_id, version, weights_sha256, state, trainer_epoch) "
    f"VALUES ('r1', 2, {D}, 'computed', 1); "
    f"UPDATE policy_versions SET weights_sha256 = {E} WHERE version = 2",
    "INSERT INTO snapshots VALUES ('r1', 3, 0, 0, 1, '{}')",
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "statements"), ILLEGAL, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(ILLEGAL)]
)
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    with pytest.raises(psycopg.IntegrityError) as refused, moment.transaction() as tx:
        tx.execute(statements.encode())
    by = refused.value.diag.constraint_name
    assert by == rule or rule in str(refused.value)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    with moment.transaction() as tx:
        tx.execute(statements.encode())
        raise psycopg.Rollback
