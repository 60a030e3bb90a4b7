"""Questions people ask, as SQL over the ledger's views. Reading only."""

from typing import Any

from storage import holds
from storage.database import Tx

Row = dict[str, Any]


def runs(tx: Tx) -> list[Row]:
    """One line per run: where it stands."""
    return tx.execute(
        """
        SELECT r.run_id AS run, r.state, r.next_step AS step, r.version, v.version AS served,
               r.durable_step, b.drawn, b.trained, b.owed, r.failure, r.created_at
          FROM ledger.runs r
          LEFT JOIN ledger.served v USING (run_id)
          LEFT JOIN ledger.balance b USING (run_id)
         ORDER BY r.created_at
        """
    ).fetchall()


def trainer(tx: Tx, run: str) -> Row:
    """Who holds the run's lease, if anybody, and for how many seconds yet."""
    row = tx.execute(
        """
        SELECT trainer_holder AS holder,
               greatest(extract(epoch FROM trainer_lease_until - now()), 0)::float8 AS lease_left
          FROM ledger.runs WHERE run_id = %s
        """,
        (run,),
    ).fetchone()
    return row or {"holder": None, "lease_left": None}


def waiting(tx: Tx, run: str) -> list[Row]:
    """What each share waits for now: ready and running groups, slack, a due or held publication.

    `binding_group` and `held_since` say what holds the step, if it is held.
    """
    rows = tx.execute(
        "SELECT * FROM ledger.waiting WHERE run_id = %s ORDER BY share", (run,)
    ).fetchall()
    held = [holds.binding(tx, run, row["share"]) or (None, None) for row in rows]
    return [
        row | {"binding_group": group, "held_since": since}
        for row, (group, since) in zip(rows, held, strict=True)
    ]


def balance(tx: Tx, run: str) -> Row | None:
    """Every drawn group is in exactly one of these columns."""
    return tx.execute("SELECT * FROM ledger.balance WHERE run_id = %s", (run,)).fetchone()


def steps(tx: Tx, run: str, *, after: int = -1, limit: int = 1000) -> list[Row]:
    """Applied steps beyond `after`, oldest first, with their metrics."""
    return tx.execute(
        """
        SELECT step, version_before AS version, updated, groups, cause, state, metrics, applied_at,
               extract(epoch FROM applied_at - planned_at)::float8 AS seconds
          FROM ledger.steps
         WHERE run_id = %s AND step > %s AND state <> 'planned'
         ORDER BY step LIMIT %s
        """,
        (run, after, limit),
    ).fetchall()


def resubmissions(tx: Tx, run: str) -> list[Row]:
    """Resubmitted attempts by cause, with the tokens they had sampled."""
    return tx.execute(
        """
        SELECT cause::text, counts_as_failure, n, wasted_tokens
          FROM ledger.resubmissions WHERE run_id = %s ORDER BY n DESC
        """,
        (run,),
    ).fetchall()


def owed(tx: Tx, run: str, *, limit: int = 50) -> list[Row]:
    """Groups that were drawn and are neither trained nor closed, in data order."""
    return tx.execute(
        """
        SELECT g.group_id AS "group", g.task_id AS task, g.batch, p.place, g.gen, g.workflow_id
          FROM ledger.groups g JOIN ledger.group_place p USING (run_id, group_id)
         WHERE g.run_id = %s AND p.place IN ('registered', 'submitted', 'queue')
         ORDER BY g.batch, g.pos LIMIT %s
        """,
        (run, limit),
    ).fetchall()


def data(tx: Tx, run: str) -> list[Row]:
    """Where the data stands, per share: batches drawn, the durable cursor, the end if known."""
    return tx.execute(
        """
        SELECT s.share, s.handed_over, s.data_end,
               (SELECT count(*) FROM ledger.task_batches b
                 WHERE b.run_id = s.run_id AND b.share = s.share) AS batches_drawn,
               (SELECT c.data_position FROM ledger.checkpoints c
                 WHERE c.run_id = s.run_id ORDER BY c.step DESC LIMIT 1) AS durable_cursor
          FROM ledger.shares s WHERE s.run_id = %s ORDER BY s.share
        """,
        (run,),
    ).fetchall()


def group(tx: Tx, run: str, group_id: int) -> Row | None:
    """One group and its place."""
    return tx.execute(
        """
        SELECT g.*, p.place FROM ledger.groups g JOIN ledger.group_place p USING (run_id, group_id)
         WHERE g.run_id = %s AND g.group_id = %s
        """,
        (run, group_id),
    ).fetchone()


def attempts(tx: Tx, run: str, group_id: int) -> list[Row]:
    """Every attempt at every sample of a group."""
    return tx.execute(
        """
        SELECT sample, attempt, state, status::text, resubmitted_as::text AS resubmitted_as,
               cancel_cause, member, reward, truncation, turns, policy_tokens, pinned_version,
               oldest_version, worker, engine_id AS engine, error,
               extract(epoch FROM coalesce(finished_at, now()) - submitted_at)::float8 AS seconds,
               extract(epoch FROM started_at - submitted_at)::float8 AS queued_s
          FROM ledger.attempts WHERE run_id = %s AND group_id = %s ORDER BY sample, attempt
        """,
        (run, group_id),
    ).fetchall()


def timeline(tx: Tx, run: str, group_id: int) -> list[Row]:
    """The events of one group, oldest first."""
    return tx.execute(
        """
        SELECT at, kind, sample, attempt, version, step, data
          FROM ledger.group_timeline WHERE run_id = %s AND group_id = %s ORDER BY at
        """,
        (run, group_id),
    ).fetchall()


def violations(tx: Tx) -> list[Row]:
    """Must be empty at all times."""
    return tx.execute("SELECT * FROM ledger.ledger_violations").fetchall()


def step_times(tx: Tx, run: str) -> list[Row]:
    """Where the time of each step went, in seconds, oldest step first."""
    return tx.execute(
        "SELECT * FROM ledger.step_times WHERE run_id = %s ORDER BY step", (run,)
    ).fetchall()


def lags(tx: Tx, run: str) -> list[Row]:
    """Groups by step and lag."""
    return tx.execute(
        "SELECT step, lag, groups FROM ledger.lag_histogram WHERE run_id = %s ORDER BY 1, 2", (run,)
    ).fetchall()


def lengths(tx: Tx, run: str) -> list[Row]:
    """Sampled tokens of the rollouts that each step trained."""
    return tx.execute(
        """
        SELECT step, percentile_disc(0.5) WITHIN GROUP (ORDER BY policy_tokens) AS median,
               percentile_disc(0.9) WITHIN GROUP (ORDER BY policy_tokens) AS p90,
               max(policy_tokens) AS max
          FROM ledger.trained_rollouts WHERE run_id = %s GROUP BY 1 ORDER BY 1
        """,
        (run,),
    ).fetchall()


def rollout_spans(tx: Tx, run: str, *, limit: int) -> list[Row]:
    """The newest attempts in the order of their submission: when they ran, and what became of them."""
    rows = tx.execute(
        """
        SELECT a.group_id, a.sample, a.attempt, g.task_id, a.state, a.status::text, a.reward,
               a.policy_tokens, a.submitted_at, a.started_at, a.finished_at, now() AS now,
               coalesce(a.oldest_version, a.pinned_version) AS version, q.step, q.lag, g.state AS place,
               CASE WHEN a.surplus THEN 'surplus' ELSE coalesce(a.resubmitted_as::text,
                   a.cancel_cause, g.closed_cause) END AS cause
          FROM ledger.attempts a JOIN ledger.groups g USING (run_id, group_id)
          LEFT JOIN ledger.queue q ON (q.run_id, q.group_id, q.part) = (a.run_id, a.group_id, a.part)
               AND q.step IS NOT NULL AND a.member
         WHERE a.run_id = %s ORDER BY a.submitted_at DESC, a.group_id DESC, a.sample DESC LIMIT %s
        """,
        (run, limit),
    ).fetchall()
    return rows[::-1]


def served_spans(tx: Tx, run: str) -> list[Row]:
    """When each version was the newest served one."""
    return tx.execute(
        """
        SELECT version, served_at, lead(served_at) OVER (ORDER BY version) AS until
          FROM ledger.policy_versions WHERE run_id = %s AND served_at IS NOT NULL ORDER BY version
        """,
        (run,),
    ).fetchall()


def failures(tx: Tx, run: str, *, limit: int = 20) -> list[Row]:
    """The tasks that fail most, with their newest error."""
    return tx.execute(
        """
        SELECT task_id AS task, sum(n) AS failures, max(abandoned) AS "groups abandoned",
               max(left(last_error, 160)) AS error
          FROM ledger.task_failures WHERE run_id = %s AND counts_as_failure
         GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT %s
        """,
        (run, limit),
    ).fetchall()


def wasted(tx: Tx, run: str) -> list[Row]:
    """What was sampled and not trained, by cause."""
    return tx.execute(
        """
        SELECT cause, rollouts, policy_tokens AS tokens
          FROM ledger.wasted_tokens WHERE run_id = %s ORDER BY 3 DESC
        """,
        (run,),
    ).fetchall()
