"""Stored weights that nothing can ask for again. What is needed is derived from rows, never counted.

A run may let go of a version's objects when it is retired (no rollout pins it and no engine lists it:
see `versions.retire`), no checkpoint that is kept stands at it, and no evaluation is due for it. So the
newest durable version stays. A fork and its parent name the same objects: whoever lets go last deletes
them, so they stay as long as either needs them, and no longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from storage.database import Tx


def runs_with_garbage(tx: Tx) -> list[str]:
    """Runs that hold retired versions, or more checkpoints than they keep."""
    rows = tx.execute(
        """
        SELECT run_id FROM policy_versions WHERE state = 'retired'
        UNION SELECT c.run_id FROM checkpoints c JOIN runs r USING (run_id)
        WHERE c.state = 'retiring' OR c.state = 'durable' AND c.tag IS NULL
        GROUP BY c.run_id, r.config
        HAVING count(*) > (r.config -> 'run' -> 'checkpoint' ->> 'keep')::int
            OR bool_or(c.state = 'retiring')
        ORDER BY 1
        """
    ).fetchall()
    return [row["run_id"] for row in rows]


def unneeded_weights(tx: Tx, run: str) -> list[tuple[int, str]]:
    """`(version, manifest key)` of the versions whose objects may be deleted.

    A retired version gains no new pins, and a fork copies no key of it, so the answer holds until
    the objects are gone. A version whose objects another run names too is let go at once.
    """
    # Two runs that let go of the same objects at once: one of them must see that it is the last.
    tx.execute(
        """
        SELECT 1 FROM policy_versions WHERE state <> 'deleted' AND weights_key IN (
            SELECT weights_key FROM policy_versions WHERE run_id = %s AND state = 'retired')
        ORDER BY run_id, version FOR NO KEY UPDATE
        """,
        (run,),
    )
    unneeded = _unneeded(tx, run)
    rows = tx.execute(
        """
        UPDATE policy_versions p SET state = 'deleted'
        WHERE p.run_id = %s AND p.version = ANY(%s) AND EXISTS (SELECT 1 FROM policy_versions o
            WHERE o.weights_key = p.weights_key AND o.run_id <> p.run_id AND o.state <> 'deleted')
        RETURNING p.version
        """,
        (run, [version for version, _ in unneeded]),
    ).fetchall()
    shared = {row["version"] for row in rows}
    return [(version, key) for version, key in unneeded if version not in shared]


def _unneeded(tx: Tx, run: str) -> list[tuple[int, str]]:
    rows = tx.execute(
        """
        SELECT p.version, p.weights_key FROM policy_versions p
        JOIN version_pins n ON (n.run_id, n.version) = (p.run_id, p.version)
        JOIN served s ON s.run_id = p.run_id
        WHERE p.run_id = %s AND p.state = 'retired' AND p.version < s.version AND n.pins = 0
            AND NOT EXISTS (SELECT 1 FROM engine_versions e
                WHERE (e.run_id, e.version) = (p.run_id, p.version))
            AND NOT EXISTS (SELECT 1 FROM checkpoints c
                WHERE (c.run_id, c.version) = (p.run_id, p.version) AND c.state = 'durable')
            AND NOT EXISTS (SELECT 1 FROM steps t JOIN runs r USING (run_id)
                WHERE (t.run_id, t.version_before) = (p.run_id, p.version)
                    AND t.step %% (r.config #>> '{run,evaluation,every}')::int = 0
                    AND NOT EXISTS (SELECT 1 FROM evaluations v
                        WHERE (v.run_id, v.version) = (p.run_id, p.version)))
        ORDER BY p.version
        """,
        (run,),
    ).fetchall()
    return [(row["version"], row["weights_key"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Census:
    """What the ledger knows of the object store at one moment, by its own clock."""

    born: Mapping[str, datetime]
    """When each run was created."""
    named: frozenset[str]
    """Prefixes of the checkpoints that some row names."""
    now: datetime


def census(tx: Tx) -> Census:
    """Which runs there are, and which sets of objects are named."""
    clock = tx.execute("SELECT now() AS now").fetchone()
    assert clock is not None
    runs = tx.execute("SELECT run_id, created_at FROM runs").fetchall()
    named = tx.execute("SELECT s3_prefix FROM checkpoints WHERE state <> 'deleted'").fetchall()
    return Census(
        born={row["run_id"]: row["created_at"] for row in runs},
        named=frozenset(row["s3_prefix"] for row in named),
        now=clock["now"],
    )


def note_deleted_weights(tx: Tx, run: str, versions: Sequence[int]) -> None:
    """Note that the objects of retired versions are gone."""
    tx.execute(
        "UPDATE policy_versions SET state = 'deleted' "
        "WHERE run_id = %s AND version = ANY(%s) AND state = 'retired'",
        (run, list(versions)),
    )
