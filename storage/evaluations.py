"""Held-out results by version. A result is written once; evaluating again changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage.database import Tx


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


def due(tx: Tx, run: str, name: str, *, every: int | None) -> list[int]:
    """Versions without results under this name: the newest, and those before every n-th step.

    Of those that were uploaded; with `sync_every > 1` the others have no weights in the store.
    """
    rows = tx.execute(
        """
        SELECT p.version FROM ledger.policy_versions p JOIN ledger.runs r USING (run_id)
         WHERE p.run_id = %(run)s AND p.weights_key IS NOT NULL AND p.state <> 'deleted'
           AND (p.version = r.version OR p.version IN (
               SELECT s.version_before FROM ledger.steps s
                WHERE s.run_id = p.run_id AND s.step > r.first_step AND s.step %% %(every)s = 0))
           AND NOT EXISTS (SELECT 1 FROM ledger.evaluations e
                            WHERE (e.run_id, e.version) = (p.run_id, p.version)
                              AND e.name = %(name)s)
         ORDER BY 1
        """,
        {"run": run, "name": name, "every": every},
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
