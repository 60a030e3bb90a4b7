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
