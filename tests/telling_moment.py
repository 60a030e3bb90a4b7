"""One run at a telling moment, and the words in which illegal and legal changes to it are written.

Step 0 is trained, so version 1 is served; of batch 1 group 2 is admitted and group 3 is being sampled
(sample 0 runs, sample 1 queues); groups 4 and 5 are submitted, 6 and 7 registered. Each change is
tried on it and rolled back.
"""

import secrets
from collections.abc import Iterator, Mapping

import psycopg
import pytest
from psycopg import conninfo, sql

from storage.database import Ledger
from tests.rehearsal import Rehearsal, configuration

D = "decode(repeat('ab', 32), 'hex')"  # some digest
E = "decode(repeat('cd', 32), 'hex')"  # another


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
    return _insert("segments", row)


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
    return _insert("attempts", row)


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
    return _insert("queue", row)


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
    return _insert("groups", row)


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
    return _insert("runs", row, "FROM runs")


def _insert(table: str, row: Mapping[str, str], source: str = "") -> str:
    """One row, of SQL expressions by column."""
    return f"INSERT INTO {table}({', '.join(row)}) SELECT {', '.join(row.values())} {source}; "


OK = "status = 'completed', reward = 1.0, chain_lengths = '{8}'"


def refused(ledger: Ledger, rule: str, statements: str) -> None:
    """The statements must break this rule: a constraint's name, or what a guard says."""
    with pytest.raises(psycopg.IntegrityError) as error, ledger.transaction() as tx:
        tx.execute(statements.encode())
    assert error.value.diag.constraint_name == rule or rule in str(error.value)


def accepted(ledger: Ledger, statements: str) -> None:
    """The statements must break no rule."""
    with ledger.transaction() as tx:
        tx.execute(statements.encode())
        raise psycopg.Rollback


def numbered(cases: list[tuple[str, str]]) -> list[str]:
    """A name for each refused case."""
    return [f"{i}-{rule}" for i, (rule, _) in enumerate(cases)]


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
