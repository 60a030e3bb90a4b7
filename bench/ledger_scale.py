"""How fast the ledger's views answer when a run has a million rollouts.

Fills a fresh ledger (embedded Postgres in a temporary folder) with one finished-looking run: groups of
eight, a segment each, resubmissions, failures, losses, cut and abandoned groups; then asks every view.
The rows are written in bulk with the triggers off, so the guards' rules hold by construction here.

    python bench/ledger_scale.py [--rollouts 1000000]

Fails if a view needs more than two seconds. Those that look at every rollout are asked for one run, as
docs/sql.md does.
"""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rollbook.stack import ports
from rollbook.stack.postgres import Postgres
from rollbook.stack.supervise import Supervisor
from storage import database, runs
from storage.database import Ledger
from tests.rehearsal import configuration

LIMIT_S = 2.0
SIZE, BATCH = 8, 32
RUN = "scale"

FILL = """
SET LOCAL session_replication_role = replica;
INSERT INTO task_batches(run_id, batch, share, tasks, groups, data_position, content_sha256)
SELECT 'scale', b, 0, {batch}, {batch}, '{{}}', pg_catalog.sha256('x') FROM generate_series(0, {batches} - 1) b;
INSERT INTO policy_versions(run_id, version, weights_sha256, weights_key, weights_bytes, state,
    trainer_epoch, uploaded_at, served_at)
SELECT 'scale', v, pg_catalog.sha256(v::text::bytea), 'k', 1, CASE WHEN v = {batches} - 2 THEN 'served' ELSE 'retired' END,
    1, t, t + interval '1 s'
FROM generate_series(0, {batches} - 2) v, LATERAL (SELECT now() - ({batches} - v) * interval '20 s' AS t) x;
INSERT INTO steps(run_id, step, version_before, updated, groups, state, planned_epoch, applied_epoch,
    plan_sha256, weights_sha256, metrics, planned_at, applied_at)
SELECT 'scale', s, s, true, {batch}, 'durable', 1, 1, pg_catalog.sha256('p'), pg_catalog.sha256('w'),
    '{{"reward/mean": 0.5, "time/compute_s": 9}}', t, t + interval '10 s'
FROM generate_series(0, {batches} - 3) s, LATERAL (SELECT now() - ({batches} - s) * interval '20 s' AS t) x;
INSERT INTO step_shares(run_id, step, share, epoch, state, groups, waited_s, record)
SELECT 'scale', step, 0, 1, 'planned', {batch}, 8, '{{"waited_for": {{"groups": 7, "publish": 1}}}}' FROM steps;
INSERT INTO groups(run_id, group_id, batch, share, pos, task_id, task, state, workflow_id, begun_at,
    submitted_version, submitted_at, closed_cause, closed_step, updated_at)
SELECT 'scale', g, g / {batch}, 0, g % {batch}, 'task' || g % 20000, '{{}}', x.state,
    'run/scale/g' || g || '~0', t, greatest(0, g / {batch} - 1), t,
    CASE WHEN x.state = 'abandoned' THEN 'max_attempts' END,
    CASE WHEN x.state = 'abandoned' THEN g / {batch} END, t + interval '15 s'
FROM generate_series(0, {groups} - 1) g,
    LATERAL (SELECT CASE WHEN g >= {groups} - 2 * {batch} THEN 'submitted'
        WHEN g % 101 = 0 THEN 'abandoned' ELSE 'complete' END AS state,
        now() - ({batches} - g / {batch}) * interval '20 s' AS t) x;
INSERT INTO attempts(run_id, group_id, sample, attempt, gen, state, status, resubmitted_as,
    counts_as_failure, fence, worker, engine_id, submitted_version, pinned_version, oldest_version,
    newest_version, turns, policy_tokens, env_tokens, reward, chain_lengths, truncation, member, part,
    error_type, error, submitted_at, started_at, last_progress_at, finished_at)
SELECT g.run_id, g.group_id, s, a, 0, CASE WHEN live THEN 'running' ELSE 'finished' END,
    CASE WHEN live THEN NULL WHEN failed THEN 'infra_error' WHEN s = 7 THEN 'truncated' ELSE 'completed' END::rollout_status,
    CASE WHEN failed AND a = 0 THEN 'infra_error' END::resubmit_cause, failed, 1, 'host:1', 'http://e',
    g.submitted_version, g.submitted_version, g.submitted_version, g.submitted_version, 1, 300, 100,
    CASE WHEN NOT live AND NOT failed THEN (g.group_id + s) % 100 / 100.0 END,
    CASE WHEN NOT live AND NOT failed THEN ARRAY[400] END,
    CASE WHEN NOT live AND NOT failed AND s = 7 THEN 'tokens' END,
    NOT live AND NOT failed, CASE WHEN NOT live AND NOT failed AND g.state = 'complete' THEN 0 END,
    CASE WHEN failed THEN 'INFRA_ERROR' END, CASE WHEN failed THEN 'Env.reset raised OSError: no sandbox' END,
    g.submitted_at, g.submitted_at + interval '1 s', g.submitted_at + interval '9 s',
    CASE WHEN NOT live THEN g.submitted_at + interval '10 s' END
FROM groups g, generate_series(0, {size} - 1) s, generate_series(0, 1) a,
    LATERAL (SELECT g.state = 'submitted' AS live, g.state <> 'submitted'
        AND ((a = 0 AND (g.group_id + s) % 31 = 0) OR (g.state = 'abandoned' AND s = 0)) AS failed) f
WHERE a = 0 OR ((g.group_id + s) % 31 = 0 AND g.state <> 'submitted') OR (g.state = 'abandoned' AND s = 0);
INSERT INTO queue(run_id, group_id, part, gen, share, oldest_version, chain_lengths, members, state,
    step, pos, lag, cause, closed_step, admitted_at)
SELECT g.run_id, g.group_id, 0, 0, 0, g.submitted_version, array_fill(400, ARRAY[{size}]), {size},
    CASE WHEN g.group_id % 57 = 0 THEN 'cut' ELSE 'trained' END,
    CASE WHEN g.group_id % 57 <> 0 THEN g.batch END, CASE WHEN g.group_id % 57 <> 0 THEN g.pos END,
    CASE WHEN g.group_id % 57 <> 0 THEN least(1, g.batch) END,
    CASE WHEN g.group_id % 57 = 0 THEN 'rows' END, CASE WHEN g.group_id % 57 = 0 THEN g.batch END,
    g.submitted_at + interval '11 s'
FROM groups g WHERE g.state = 'complete';
INSERT INTO segments(run_id, group_id, sample, attempt, seq, turn, chain, context_start, prompt_tokens,
    prompt_delta, tokens, sampled_ids, logprobs, version_spans, oldest_version, newest_version,
    kv_version, finish_reason, engine_id, fence, created_at)
SELECT a.run_id, a.group_id, a.sample, a.attempt, 0, 0, 0, 0, 2, '\\x0000000001000000', 2,
    '\\x0000000001000000', '\\x0000000000000000', ARRAY[a.pinned_version, 2], a.pinned_version,
    a.pinned_version, a.pinned_version, 'stop', 'http://e', 1, a.started_at FROM attempts a;
INSERT INTO events(at, run_id, kind, group_id, sample, attempt, data)
SELECT a.submitted_at, a.run_id, 'attempts.finished', a.group_id, a.sample, a.attempt, '{{}}' FROM attempts a;
INSERT INTO checkpoints(run_id, step, version, s3_prefix, manifest_sha256, bytes, data_position, rng,
    world, trainer_epoch)
SELECT 'scale', {batches} - 2, {batches} - 2, 'p', pg_catalog.sha256('m'), 1, '{{}}', '{{}}', '{{}}', 1;
UPDATE runs SET version = {batches} - 2, next_step = {batches} - 2, state = 'running', durable_step = {batches} - 2;
"""

# A view -> the filter that docs/sql.md gives it.
VIEWS = {
    "waiting": "run_id = 'scale'",
    "balance": "run_id = 'scale'",
    "task_balance": "run_id = 'scale' AND task_id = 'task7'",
    "task_failures": "run_id = 'scale' AND task_id = 'task101'",
    "stuck_rollouts": "run_id = 'scale'",
    "lag_histogram": "run_id = 'scale'",
    "resubmissions": "run_id = 'scale'",
    "wasted_tokens": "run_id = 'scale'",
    "reward_by_version": "run_id = 'scale'",
    "token_rate": "run_id = 'scale'",
    "version_pins": "run_id = 'scale'",
    "group_timeline": "run_id = 'scale' AND group_id = 4242",
    "group_place": "run_id = 'scale' AND group_id = 4242",
    "trained_rollouts": "run_id = 'scale' AND step = 3",
    "step_times": "run_id = 'scale'",
    "outstanding": "run_id = 'scale'",
    "served": "run_id = 'scale'",
    "ledger_violations": "true",
}


def main() -> int:
    """Fill and ask; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    rollouts = parser.parse_args().rollouts
    batches = max(4, rollouts // (SIZE * BATCH))
    with tempfile.TemporaryDirectory(prefix="rollbook-scale-") as folder:
        state = Path(folder)
        state.chmod(0o711)
        with Supervisor(state / "pids") as supervisor:
            server = Postgres(
                state=state,
                port=ports.free_port(),
                password=secrets.token_hex(16),
                settings={"fsync": "off", "max_wal_size": "4GB"},
            )
            server.prepare()
            supervisor.start(server.command())
            supervisor.wait_ready("postgres")
            return _measure(server.url("postgres"), batches)


def _measure(url: str, batches: int) -> int:
    database.upgrade(url)
    ledger = Ledger.open(url, pool=1)
    config = configuration(name=RUN, tasks={"batch_size": BATCH}, groups={"size": SIZE})
    ledger.call(runs.create, config, world={})
    ledger.close()
    began = time.monotonic()
    fill = FILL.format(batch=BATCH, batches=batches, groups=batches * BATCH, size=SIZE)
    with psycopg.connect(url, options="-c search_path=ledger") as connection:
        for statement in fill.split(";\n"):
            if statement.strip():
                connection.execute(statement.encode())
        row = connection.execute("SELECT count(*) FROM attempts").fetchone()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    assert row is not None
    print(f"{row[0]:,} attempts written in {time.monotonic() - began:.0f} s")
    slow = []
    with psycopg.connect(url, autocommit=True, options="-c search_path=ledger") as connection:
        broken = connection.execute("SELECT * FROM ledger_violations").fetchall()
        assert not broken, broken
        for view, where in VIEWS.items():
            seconds, rows = min(_ask(connection, view.strip(), where) for _ in range(2))
            verdict = "" if seconds <= LIMIT_S else "  TOO SLOW"
            print(f"{view.strip():20} {seconds:7.3f} s {rows:8,} rows   WHERE {where}{verdict}")
            slow += [view] if verdict else []
    return 1 if slow else 0


def _ask(
    connection: "psycopg.Connection[tuple[object, ...]]", view: str, where: str
) -> tuple[float, int]:
    began = time.monotonic()
    query = "SELECT * FROM " + view + " WHERE " + where  # noqa: S608 (constants of this file)
    rows = connection.execute(query.encode()).fetchall()
    return time.monotonic() - began, len(rows)


if __name__ == "__main__":
    raise SystemExit(main())
