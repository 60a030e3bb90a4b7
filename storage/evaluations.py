"""Held-out results by version. A result is written once; evaluating again changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def summary(tx: Tx, run: str) -> list[dict[str, object]]:
    """Per data set and version: rollouts, mean reward, and the share that got the whole reward 1."""
    return tx.execute(
        """
        SELECT name, version, count(*) AS n, avg(reward) AS mean,
               avg((reward >= 1)::int)::float8 AS solved
          FROM ledger.evaluations WHERE run_id = %s GROUP BY 1, 2 ORDER BY 1, 2
        """,
        (run,),
    ).fetchall()
