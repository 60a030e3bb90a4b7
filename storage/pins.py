"""Pins of an attempt whose version may change between requests (`sampling.policy = "segment"`).

What is pinned is not retired: the version that is sampled from, and the anchor of the retained cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from domain.errors import Fenced
from domain.messages import AttemptIn
from storage import attempts
from storage.database import Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the next request samples from, and the anchor of the KV it may extend."""

    version: int
    anchor: int


_SERVED = """
SELECT version FROM policy_versions WHERE run_id = %(run)s AND state = 'served'
    AND version = (SELECT version FROM served WHERE run_id = %(run)s)
FOR KEY SHARE"""


def choose_version(
    tx: Tx,
    i: AttemptIn,
    fence: int,
    *,
    max_staleness: int,
    refill: bool,
    resident: Sequence[int],
) -> Choice:
    """The version of the next request under `sampling.policy = "segment"`, pinned with its KV anchor.

    The newest served version, while the retained cache is at most `max_staleness` versions older.
    Beyond that, `refill` rebuilds the prefix under it; `hold` stays at the newest version within the
    bound that an engine still holds, and rebuilds only when none is left.

    Args:
        tx: the transaction.
        i: the attempt.
        fence: of this execution.
        max_staleness: bound on version minus anchor.
        refill: `kv_cache.on_limit = "refill"`.
        resident: versions that live engines hold.

    Raises:
        Fenced: another execution owns the attempt.
        LedgerError: nothing is served.
    """
    served = _lock_served(tx, i.run)
    row = tx.execute(
        """SELECT kv_version, sampling_version FROM attempts
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)
            AND fence = %(fence)s AND state = 'running' FOR NO KEY UPDATE""",
        attempts.key_of(i) | {"fence": fence},
    ).fetchone()
    if row is None:
        raise Fenced(attempts.not_ours(i, fence))
    anchor = row["kv_version"]
    if anchor is None or (served - anchor > max_staleness and refill):
        choice = Choice(version=served, anchor=served)
    elif served - anchor <= max_staleness:
        choice = Choice(version=served, anchor=anchor)
    else:
        pinned = {anchor, row["sampling_version"]}
        held = [
            version
            for version in sorted(set(resident), reverse=True)
            if anchor <= version <= anchor + max_staleness
            and (version in pinned or _share_served(tx, i.run, version))
        ]
        choice = (
            Choice(version=held[0], anchor=anchor)
            if held
            else Choice(version=served, anchor=served)
        )
    tx.execute(
        """UPDATE attempts SET sampling_version = %(v)s, kv_version = %(kv)s
        WHERE (run_id, group_id, sample, attempt) = (%(run)s, %(group)s, %(sample)s, %(attempt)s)""",
        attempts.key_of(i) | {"v": choice.version, "kv": choice.anchor},
    )
    return choice


def _lock_served(tx: Tx, run: str) -> int:
    """The served version, kept from being retired until this transaction ends."""
    for _ in range(attempts.LOOKS):
        row = tx.execute(_SERVED, {"run": run}).fetchone()
        if row is not None:
            return int(row["version"])
    raise attempts.nothing_served(run)


def _share_served(tx: Tx, run: str, version: int) -> bool:
    found = tx.execute(
        """SELECT 1 FROM policy_versions
        WHERE (run_id, version) = (%s, %s) AND state = 'served' FOR KEY SHARE""",
        (run, version),
    ).fetchone()
    return found is not None
