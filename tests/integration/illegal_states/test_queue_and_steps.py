"""Admissions are bound to a step once and for ever; steps are applied once."""

import pytest

from storage.database import Ledger
from tests.telling_moment import (
    PLAN2,
    STEP1,
    WITHDRAW,
    D,
    E,
    Q,
    accepted,
    numbered,
    queued,
    refused,
)

ILLEGAL = [
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
]  # fmt: skip

LEGAL = [
    WITHDRAW + queued(group_id="2", gen="1"),
    PLAN2,
    PLAN2 + Q + "state = 'applied' WHERE group_id = 2",
    Q + "state = 'cut', cause = 'rows', closed_step = 1 WHERE group_id = 2",
    queued() + queued(part="1"),
    STEP1 + "UPDATE steps SET state = 'applied', updated = false, cause = 'empty', groups = 0, "
    f"weights_sha256 = {D}, applied_at = now() WHERE step = 1",
    STEP1 + "UPDATE steps SET state = 'applied', updated = true, groups = 2, "
    f"weights_sha256 = {E}, applied_at = now() WHERE step = 1; "
    "UPDATE steps SET state = 'durable' WHERE step = 1",
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
