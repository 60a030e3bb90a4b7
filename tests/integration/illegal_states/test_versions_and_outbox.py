"""Versions, engines, checkpoints, the outbox and snapshots."""

import pytest

from storage.database import Ledger
from tests.telling_moment import S0, D, E, accepted, numbered, refused

ILLEGAL = [
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
    "UPDATE policy_versions SET state = 'draining' WHERE version = 0",
    "INSERT INTO policy_versions(run_id, version, weights_sha256, state, trainer_epoch) "
    f"VALUES ('r1', 2, {D}, 'computed', 1); "
    f"UPDATE policy_versions SET weights_sha256 = {E} WHERE version = 2",
    "INSERT INTO snapshots VALUES ('r1', 3, 0, 0, 1, '{}')",
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
