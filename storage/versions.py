"""The policy-version ledger: which weights exist, who holds them, which may be sampled.

    computed → uploaded → loading → served → draining → retired → deleted

A version is `served` once every live engine acknowledged it; only then may attempts pin it. Old
versions stay while a running attempt pins them (view `version_pins`: derived, so it cannot leak).
An engine's acknowledgements belong to one incarnation of its process and vanish with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from domain.config import RunConfig
from domain.errors import DigestMismatch, LedgerError
from domain.ids import publish_workflow_id
from domain.messages import PublishIn
from storage import cancelling, evaluations, outbox, runs
from storage.database import Tx, jsonb


@dataclass(frozen=True, slots=True)
class Route:
    """A live engine that acknowledged a version."""

    engine: str
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a version's weights lie, what they must hash to, and the drift probe."""

    manifest_key: str
    sha256: bytes
    probe: Mapping[str, Any] | None


def served(tx: Tx, run: str) -> int | None:
    """The newest version that all serving engines acknowledged."""
    row = tx.execute("SELECT version FROM served WHERE run_id = %s", (run,)).fetchone()
    return None if row is None else int(row["version"])


def state(tx: Tx, run: str, version: int) -> str:
    """The version's state.

    Raises:
        LedgerError: the version is not registered.
    """
    return str(_row(tx, run, version)["state"])


def weights(tx: Tx, run: str, version: int) -> Weights:
    """What an engine must load.

    Raises:
        LedgerError: the version is not registered, or was never uploaded.
    """
    row = _row(tx, run, version)
    if row["weights_key"] is None:
        raise LedgerError(f"{run}@{version} is {row['state']}: its weights were not uploaded yet")
    return Weights(row["weights_key"], bytes(row["weights_sha256"]), row["probe"])


def digest(tx: Tx, run: str, version: int) -> bytes:
    """Digest of a version's weights, as the step that made them recorded it."""
    return bytes(_row(tx, run, version)["weights_sha256"])


def record_weights(
    tx: Tx,
    run: str,
    epoch: int,
    version: int,
    *,
    manifest_key: str,
    bytes: int,
    probe: Mapping[str, Any] | None,
) -> None:
    """Register the upload of a computed version; a repetition changes nothing."""
    runs.fence(tx, run, epoch)
    _row(tx, run, version)
    tx.execute(
        """
        UPDATE policy_versions SET state = 'uploaded', weights_key = %s, weights_bytes = %s,
            probe = %s, uploaded_at = now(), trainer_epoch = %s
        WHERE run_id = %s AND version = %s AND state = 'computed'
        """,
        (manifest_key, bytes, None if probe is None else jsonb(probe), epoch, run, version),
    )


def publish(tx: Tx, run: str, epoch: int, version: int) -> bool:
    """Have engines load an uploaded version; False: no engine slot can take it yet.

    A held publish stays `uploaded`, says since when and for which rollouts, and is asked for again
    at the next poll. Under `on_resident_limit = "cancel"` the oldest pinned rollouts are cancelled
    and resubmitted, which is no failure.

    Raises:
        LedgerError: the version was not uploaded, or is retired already.
    """
    owner = runs.fence(tx, run, epoch)
    row = _row(tx, run, version, lock=True)
    command = asdict(PublishIn(run=run, version=version))
    if row["state"] == "served":
        return True
    if row["state"] == "loading":
        # A trainer that starts again asks again: Temporal may have lost the publication.
        outbox.repeat(tx, run, "publish", publish_workflow_id(run, version), command)
        return True
    if row["state"] != "uploaded":
        raise LedgerError(
            f"{run}@{version} is {row['state']}; only an uploaded version is published"
        )
    evaluations.make_room(tx, run, version)
    blocking = _pins_in_the_way(tx, run, version, owner.config)
    if blocking:
        held_by = ", ".join(f"g{group} s{sample}.a{attempt}" for group, sample, attempt in blocking)
        tx.execute(
            "UPDATE policy_versions SET held_since = coalesce(held_since, now()), held_by = %s "
            "WHERE run_id = %s AND version = %s",
            (held_by, run, version),
        )
        if owner.config.sampling.on_resident_limit == "cancel":
            cancelling.signal_attempts(tx, run, blocking, "resident_limit")
        return False
    tx.execute(
        "UPDATE policy_versions SET state = 'loading', held_since = NULL, held_by = NULL "
        "WHERE run_id = %s AND version = %s",
        (run, version),
    )
    outbox.repeat(tx, run, "publish", publish_workflow_id(run, version), command)
    return True


def see_engine(
    tx: Tx, run: str, engine_url: str, incarnation: int, max_resident: int, alive_s: float
) -> None:
    """Note that an engine answered; a new incarnation starts without acknowledgements."""
    tx.execute(
        "DELETE FROM engine_versions WHERE run_id = %s AND engine_id = %s AND incarnation <> %s",
        (run, engine_url, incarnation),
    )
    tx.execute(
        """
        INSERT INTO engines(run_id, engine_id, incarnation, max_resident, alive_until)
        VALUES (%s, %s, %s, %s, now() + make_interval(secs => %s))
        ON CONFLICT (run_id, engine_id) DO UPDATE SET incarnation = excluded.incarnation,
            max_resident = excluded.max_resident, alive_until = excluded.alive_until
        """,
        (run, engine_url, incarnation, max_resident, alive_s),
    )


def acknowledge(
    tx: Tx, run: str, engine_url: str, incarnation: int, version: int, sha256: bytes
) -> bool:
    """Note that an engine holds a version; False: that incarnation is gone, load it again.

    Raises:
        DigestMismatch: the engine loaded other weights under this name.
    """
    expected = bytes(_row(tx, run, version)["weights_sha256"])
    if expected != sha256:
        raise DigestMismatch(
            f"engine {engine_url} holds {sha256.hex()[:16]} as {run}@{version}, the ledger has "
            f"{expected.hex()[:16]}; restart that engine"
        )
    engine = tx.execute(
        "SELECT 1 FROM engines WHERE run_id = %s AND engine_id = %s AND incarnation = %s "
        "FOR NO KEY UPDATE",
        (run, engine_url, incarnation),
    ).fetchone()
    if engine is None:
        return False
    tx.execute(
        "INSERT INTO engine_versions(run_id, engine_id, version, incarnation, weights_sha256) "
        "VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
        (run, engine_url, version, incarnation, sha256),
    )
    return True


def unloaded(tx: Tx, run: str, engine_url: str, version: int) -> None:
    """Note that an engine no longer holds a version."""
    tx.execute(
        "DELETE FROM engine_versions WHERE run_id = %s AND engine_id = %s AND version = %s",
        (run, engine_url, version),
    )


def mark_served(tx: Tx, run: str, version: int, *, without: Sequence[str] = ()) -> bool:
    """Serve a loading version once every live engine acknowledged it; whether its publication is over.

    It is over too once a newer version has superseded this one, or the run was closed or failed: when
    it is resumed, its trainer publishes again. Engines named in `without` (base URLs) refused it or are
    too slow, and are not waited for; some engine must have acknowledged.
    """
    if runs.read(tx, run).state in ("closed", "failed"):
        return True
    row = _row(tx, run, version, lock=True)
    if row["state"] in ("served", "draining", "retired", "deleted"):
        return True
    if row["state"] != "loading":
        return False
    engines = tx.execute(
        """
        SELECT count(*) AS live, count(v.version) AS acknowledged FROM engines e
        LEFT JOIN engine_versions v ON (v.run_id, v.engine_id, v.incarnation, v.version)
            = (e.run_id, e.engine_id, e.incarnation, %s)
        WHERE e.run_id = %s AND e.alive_until > now()
            AND (v.version IS NOT NULL OR NOT e.engine_id = ANY(%s))
        """,
        (version, run, list(without)),
    ).fetchone()
    assert engines is not None
    if engines["live"] == 0 or engines["acknowledged"] < engines["live"]:
        return False
    tx.execute(
        "UPDATE policy_versions SET state = 'served', served_at = now() "
        "WHERE run_id = %s AND version = %s",
        (run, version),
    )
    return True


def routable(tx: Tx, run: str) -> list[Route]:
    """Live engines and the versions they may be asked for, newest version first."""
    rows = tx.execute(
        """
        SELECT e.engine_id AS engine, e.incarnation, v.version FROM engines e
        JOIN engine_versions v USING (run_id, engine_id, incarnation)
        JOIN policy_versions p ON (p.run_id, p.version) = (v.run_id, v.version)
        WHERE e.run_id = %s AND e.alive_until > now() AND p.state IN ('served', 'draining')
        ORDER BY v.version DESC, e.engine_id
        """,
        (run,),
    ).fetchall()
    return [Route(**row) for row in rows]


def wanted(tx: Tx, run: str) -> list[int]:
    """Versions every engine must hold: the newest served, newer ones that load, and the pinned."""
    rows = tx.execute(
        """
        SELECT p.version FROM policy_versions p
        LEFT JOIN served s ON s.run_id = p.run_id
        JOIN version_pins n ON (n.run_id, n.version) = (p.run_id, p.version)
        WHERE p.run_id = %s AND (p.version = s.version
            OR (p.state = 'loading' AND p.version > coalesce(s.version, -1))
            OR (n.pins > 0 AND p.state IN ('loading', 'served', 'draining')))
        ORDER BY 1
        """,
        (run,),
    ).fetchall()
    return [int(row["version"]) for row in rows]


def retire(tx: Tx, run: str) -> list[int]:
    """Drain superseded versions without pins and return those that engines should unload.

    `draining` blocks new pins first; a version is `retired` once no engine lists it any more.
    """
    tx.execute(
        "SELECT 1 FROM policy_versions WHERE run_id = %s AND state IN "
        "('uploaded', 'loading', 'served', 'draining') ORDER BY version FOR UPDATE",
        (run,),
    )
    tx.execute(
        """
        UPDATE policy_versions p SET state = 'retired', retired_at = now(),
            held_since = NULL, held_by = NULL
        WHERE p.run_id = %(run)s AND (p.state = 'draining' OR (p.state IN ('uploaded', 'loading')
                AND p.version < (SELECT s.version FROM served s WHERE s.run_id = p.run_id)))
            AND NOT EXISTS (SELECT 1 FROM engine_versions e
                            WHERE (e.run_id, e.version) = (p.run_id, p.version))
            AND (SELECT n.pins FROM version_pins n
                 WHERE (n.run_id, n.version) = (p.run_id, p.version)) = 0
        """,
        {"run": run},
    )
    tx.execute(
        """
        UPDATE policy_versions p SET state = 'draining', served_at = coalesce(served_at, now())
        WHERE p.run_id = %(run)s AND p.state IN ('loading', 'served')
            AND p.version < (SELECT s.version FROM served s WHERE s.run_id = p.run_id)
            AND (SELECT n.pins FROM version_pins n
                 WHERE (n.run_id, n.version) = (p.run_id, p.version)) = 0
        """,
        {"run": run},
    )
    rows = tx.execute(
        """
        SELECT p.version FROM policy_versions p JOIN version_pins n USING (run_id, version)
        WHERE p.run_id = %s AND p.state = 'draining' AND n.pins = 0 ORDER BY 1
        """,
        (run,),
    ).fetchall()
    return [int(row["version"]) for row in rows]


def _pins_in_the_way(
    tx: Tx, run: str, version: int, config: RunConfig
) -> list[tuple[int, int, int]]:
    """The oldest pinned rollouts that leave `version` no slot on some live engine.

    The served version needs no slot of its own unless it is pinned: an engine with one slot swaps.
    Where all have one slot, a rollout sampled segment by segment is in the way only if its KV would
    be too old under `version` and may not be computed again.
    """
    rows = tx.execute(
        """
        SELECT a.group_id, a.sample, a.attempt, min(v) AS version, min(a.kv_version) AS anchor
        FROM attempts a,
            unnest(ARRAY[CASE WHEN a.sampling_version IS NULL THEN a.pinned_version END,
                         a.sampling_version, a.kv_version]) AS v
        WHERE a.run_id = %s AND a.state = 'running' AND v IS NOT NULL
        GROUP BY 1, 2, 3
        """,
        (run,),
    ).fetchall()
    pinned = {row["version"] for row in rows} - {version}
    slots = tx.execute(
        "SELECT min(max_resident) AS n, max(max_resident) AS most FROM engines WHERE run_id = %s AND alive_until > now()",
        (run,),
    ).fetchone()
    assert slots is not None
    if slots["n"] is None or len(pinned) < slots["n"]:
        return []
    cache = config.sampling.kv_cache
    if slots["most"] == 1 and config.sampling.policy == "segment":
        if cache.on_limit == "refill":
            return []
        rows = [row for row in rows if row["anchor"] is not None]
        pinned = {row["version"] for row in rows if version - row["anchor"] > cache.max_staleness}
        if not pinned:
            return []
    oldest = min(pinned)
    return sorted(
        (row["group_id"], row["sample"], row["attempt"]) for row in rows if row["version"] == oldest
    )


def _row(tx: Tx, run: str, version: int, *, lock: bool = False) -> dict[str, Any]:
    query = (
        "SELECT * FROM policy_versions WHERE run_id = %s AND version = %s FOR NO KEY UPDATE"
        if lock
        else "SELECT * FROM policy_versions WHERE run_id = %s AND version = %s"
    )
    row = tx.execute(query, (run, version)).fetchone()
    if row is None:
        raise LedgerError(f"{run}@{version} is not in the ledger; no trainer has made that version")
    return row
