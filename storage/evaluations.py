"""Held-out results by version. A version's results are written once, all together.

While a run goes on, a version that is to be evaluated is *pinned* in the transaction that plans the
step it stands before, so that engines keep it as they keep what a rollout samples. The pin yields: a
publication that needs the slot takes it (`make_room`), and the version is evaluated when the run has
ended, from its stored weights. So an evaluation waits for no gate, and nothing waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from domain.ids import policy_name
from storage.database import Tx
from storage.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One evaluated rollout."""

    task: str
    sample: int
    status: str
    reward: float | None


def record(tx: Tx, run: str, name: str, version: int, results: Sequence[Result]) -> None:
    """Keep the results of one version under the name of the data set."""
    with tx.cursor() as cursor:
        cursor.executemany(
            """
            INSERT INTO ledger.evaluations(run_id, name, version, task_id, sample, status, reward)
            VALUES (%s, %s, %s, %s, %s, %s, %s)
            ON CONFLICT (run_id, name, version, task_id, sample) DO NOTHING
            """,
            [(run, name, version, r.task, r.sample, r.status, r.reward) for r in results],
        )


def pin(tx: Tx, run: Run, step: int) -> None:
    """Pin the version before a step that is being planned, if `[evaluation] every` chooses it."""
    wanted = run.config.evaluation
    if wanted is None or wanted.every is None or step <= run.first_step or step % wanted.every:
        return
    tx.execute(
        """
        INSERT INTO ledger.evaluation_pins(run_id, version)
        SELECT p.run_id, p.version FROM ledger.policy_versions p
        WHERE p.run_id = %(run)s AND p.version = %(version)s
            AND p.state IN ('computed', 'uploaded', 'loading', 'served', 'draining')
            AND NOT EXISTS (SELECT 1 FROM ledger.evaluations e
                WHERE (e.run_id, e.name, e.version) = (p.run_id, %(name)s, p.version))
        ON CONFLICT DO NOTHING
        """,
        {"run": run.id, "version": run.version, "name": wanted.dataset},
    )


def next_pinned(tx: Tx, run: str) -> int | None:
    """The oldest pinned version that some live engine can be asked for."""
    row = tx.execute(
        """
        SELECT min(i.version) AS version FROM ledger.evaluation_pins i
            JOIN ledger.policy_versions p USING (run_id, version)
            JOIN ledger.engine_versions v USING (run_id, version)
            JOIN ledger.engines e USING (run_id, engine_id, incarnation)
        WHERE i.run_id = %s AND p.state IN ('served', 'draining') AND e.alive_until > now()
        """,
        (run,),
    ).fetchone()
    return None if row is None or row["version"] is None else int(row["version"])


def finish(tx: Tx, run: str, name: str, version: int, results: Sequence[Result]) -> None:
    """Keep a version's results and let go of it, in one transaction: it is never half evaluated."""
    record(tx, run, name, version, results)
    let_go(tx, run, version)


def let_go(tx: Tx, run: str, version: int) -> None:
    """Unpin a version that this run's evaluator is done with, whatever came of it."""
    tx.execute(
        "DELETE FROM ledger.evaluation_pins WHERE run_id = %s AND version = %s", (run, version)
    )


def yielding(tx: Tx) -> frozenset[str]:
    """Names of the policies that nothing but an evaluation keeps, of any run that shares an engine."""
    rows = tx.execute(
        """
        SELECT p.run_id, p.version FROM ledger.version_pins p
            JOIN ledger.evaluation_pins e USING (run_id, version)
        WHERE p.pins = 1 AND p.state <> 'loading'
            AND NOT EXISTS (SELECT 1 FROM ledger.served s WHERE (s.run_id, s.version) = (p.run_id, p.version))
        """
    ).fetchall()
    return frozenset(policy_name(row["run_id"], row["version"]) for row in rows)


def release(tx: Tx, run: str) -> None:
    """Let go of every pinned version: the run has ended, and evaluates what is left from storage."""
    tx.execute("DELETE FROM ledger.evaluation_pins WHERE run_id = %s", (run,))


def make_room(tx: Tx, run: str, version: int) -> None:
    """Take the slots that a publication of `version` needs from evaluations, the oldest first.

    What rollouts pin, the version to publish and the served one, which rollouts may pin until then,
    come first; the newest evaluations keep what slots are left on the smallest live engine.
    """
    tx.execute(
        """
        WITH slots AS (SELECT min(max_resident) AS n FROM ledger.engines
                WHERE run_id = %(run)s AND alive_until > now()),
            needed AS (SELECT unnest(ARRAY[CASE WHEN sampling_version IS NULL
                    THEN pinned_version END, sampling_version, kv_version]) AS v
                FROM ledger.attempts WHERE run_id = %(run)s AND state = 'running'
                UNION SELECT %(version)s
                UNION SELECT version FROM ledger.served WHERE run_id = %(run)s),
            ranked AS (SELECT i.version, row_number() OVER (ORDER BY i.version DESC) AS place
                FROM ledger.evaluation_pins i WHERE i.run_id = %(run)s
                    AND i.version NOT IN (SELECT v FROM needed WHERE v IS NOT NULL))
        DELETE FROM ledger.evaluation_pins i USING slots
        WHERE i.run_id = %(run)s AND i.version <> %(version)s
            AND (slots.n < (SELECT count(v) FROM needed)
                OR (SELECT place FROM ranked WHERE ranked.version = i.version)
                    > slots.n - (SELECT count(v) FROM needed))
        """,
        {"run": run, "version": version},
    )


def stored(tx: Tx, run: str) -> list[int]:
    """Versions whose weights can still be loaded, ascending."""
    rows = tx.execute(
        """
        SELECT version FROM ledger.policy_versions
         WHERE run_id = %s AND weights_key IS NOT NULL AND state <> 'deleted' ORDER BY 1
        """,
        (run,),
    ).fetchall()
    return [int(row["version"]) for row in rows]


def due(tx: Tx, run: str, name: str, *, every: int | None) -> list[int]:
    """Versions without results under this name: the newest, and those before every n-th step.

    Of those that are stored; with `sync_every > 1` others were never uploaded.
    """
    have = stored(tx, run)
    rows = tx.execute(
        """
        SELECT v AS version FROM unnest(%(have)s::bigint[]) AS v
         WHERE (v = %(newest)s OR v IN (
               SELECT s.version_before FROM ledger.steps s JOIN ledger.runs r USING (run_id)
                WHERE s.run_id = %(run)s AND s.step > r.first_step AND s.step %% %(every)s = 0))
           AND NOT EXISTS (SELECT 1 FROM ledger.evaluations e
                            WHERE (e.run_id, e.name, e.version) = (%(run)s, %(name)s, v))
         ORDER BY 1
        """,
        {
            "run": run,
            "name": name,
            "every": every,
            "have": have,
            "newest": have[-1] if have else None,
        },
    ).fetchall()
    return [int(row["version"]) for row in rows]


def summary(tx: Tx, run: str, name: str) -> list[dict[str, Any]]:
    """Per version: rollouts, mean reward, and the share that got the whole reward, 1."""
    return tx.execute(
        """
        SELECT name, version, count(*) AS n, avg(reward) AS mean,
               avg(coalesce(reward >= 1, false)::int)::float8 AS solved
          FROM ledger.evaluations WHERE run_id = %s AND name = %s GROUP BY 1, 2 ORDER BY 2
        """,
        (run, name),
    ).fetchall()
