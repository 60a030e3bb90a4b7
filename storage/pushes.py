"""Versions that a user's own publisher puts into engines: the ledger is told when they are there.

Such weights never pass through the object store, so no engine can be made to load them again: one
that restarted is without them until the next push.
"""

from collections.abc import Mapping

from storage import runs, versions
from storage.database import Tx

KEY = "pushed"
"""In place of a manifest's key."""

_FOR_EVER_S = 10 * 365 * 86_400.0
"""Engines that only their publisher knows are not watched."""


def record(tx: Tx, run: str, epoch: int, version: int, *, engines: Mapping[str, int]) -> None:
    """Note that a version is in the engines and may be sampled from; a repetition is harmless.

    Superseded versions that no rollout pins leave the routes.

    Args:
        tx: transaction.
        run: whose version.
        epoch: the trainer's fencing token.
        version: which.
        engines: incarnation by base URL.
    """
    runs.fence(tx, run, epoch)
    row = tx.execute(
        """
        UPDATE policy_versions SET state = 'served', weights_key = coalesce(weights_key, %s),
            uploaded_at = coalesce(uploaded_at, now()), served_at = coalesce(served_at, now())
        WHERE run_id = %s AND version = %s AND state IN ('computed', 'uploaded', 'loading', 'served')
        RETURNING weights_sha256
        """,
        (KEY, run, version),
    ).fetchone()
    assert row is not None, f"{run}@{version} cannot be served any more"
    for url, incarnation in sorted(engines.items()):
        versions.see_engine(tx, run, url, incarnation, 1, _FOR_EVER_S)
        versions.acknowledge(tx, run, url, incarnation, version, bytes(row["weights_sha256"]))
    for superseded in versions.retire(tx, run):
        for url in engines:
            versions.unloaded(tx, run, url, superseded)
