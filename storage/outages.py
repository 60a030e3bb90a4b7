"""Whether a run that waits for rollouts waits in vain: nothing of it has moved for too long, and why.

What a person or a slow tool holds up is no outage: an attempt that is being worked at, and whose time
is not up, is waited for however long it takes. (`rollbook stuck` shows it.)
"""

from collections.abc import Iterator

from storage import idle
from storage.database import Tx
from storage.idle import Parts


def find(tx: Tx, run: str, *, limit_s: float) -> str | None:
    """Which parts of the platform have been away for `limit_s` seconds; None if the run moves."""
    row = tx.execute(
        """
        SELECT extract(epoch FROM now() - max(greatest(a.submitted_at, a.started_at,
                a.last_progress_at, a.finished_at, q.admitted_at)))::float8 AS still_s,
            coalesce(bool_or(a.state = 'running' AND (r.timeout_s IS NULL OR
                a.submitted_at > now() - make_interval(secs => 1.25 * r.timeout_s))), false) AS busy
        FROM runs r JOIN groups g USING (run_id)
            LEFT JOIN attempts a USING (run_id, group_id)
            LEFT JOIN queue q ON (q.run_id, q.group_id) = (g.run_id, g.group_id)
                AND q.state = 'admitted'
        WHERE r.run_id = %s AND (g.state = 'submitted' OR q.state IS NOT NULL)
        """,
        (run,),
    ).fetchone()
    assert row is not None
    if row["busy"] or row["still_s"] is None or row["still_s"] < limit_s:
        return None
    return parts_away(tx, run, limit_s=limit_s) or "its workflows do not go on"


def parts_away(tx: Tx, run: str, *, limit_s: float) -> str:
    """The parts that a run needs and that have not been there for `limit_s` seconds; may be empty."""
    return "; ".join(_away(idle.parts(tx, run), limit_s))


def _away(parts: Parts, limit_s: float) -> Iterator[str]:
    if (parts.oldest_undelivered_s or 0.0) > limit_s:
        why = parts.delivery_error or "no ledger worker leads"
        yield f"{parts.undelivered} commands for Temporal are not delivered: {why}"
    if not parts.engines_alive:
        yield "no engine is seen"
    if (parts.oldest_waiting_s or 0.0) > limit_s:
        yield f"no workflow worker begins {parts.waiting_groups} groups"
    if (parts.oldest_queued_s or 0.0) > limit_s:
        yield f"no rollout worker takes {parts.queued} attempts"
