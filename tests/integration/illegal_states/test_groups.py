"""What a group may become."""

import pytest

from storage.database import Ledger
from tests.telling_moment import FREE, WITHDRAW, G, accepted, group, numbered, refused

ILLEGAL = [
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
]  # fmt: skip

LEGAL = [
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
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
