"""What an attempt may become, and when it may be a member."""

import pytest

from storage.database import Ledger
from tests.telling_moment import FINISH, OK, S0, S1, accepted, attempt, numbered, refused

ILLEGAL = [
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
]  # fmt: skip

LEGAL = [
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
]  # fmt: skip


@pytest.mark.parametrize(("rule", "statements"), ILLEGAL, ids=numbered(ILLEGAL))
def test_an_illegal_state_is_refused(moment: Ledger, rule: str, statements: str) -> None:
    refused(moment, rule, statements)


@pytest.mark.parametrize("statements", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_state_is_accepted(moment: Ledger, statements: str) -> None:
    accepted(moment, statements)
