"""The durable queue: one row per admitted part of a group, in completion order.

    admitted → planned → applied → trained        admitted → cut | expired (withdrawn)

A row is written once; a part is admitted, hence trained, at most once (`queue_once`).
"""

from storage.database import Tx


def admit(tx: Tx, run: str, group: int, part: int) -> int:
    """Queue the finished members of a locked group that have no part yet; returns their number.

    Nothing is queued when there are none. The row's age is that of the oldest member.
    """
    members = tx.execute(
        "UPDATE attempts SET part = %s WHERE run_id = %s AND group_id = %s AND member "
        "AND part IS NULL",
        (part, run, group),
    ).rowcount
    if members:
        tx.execute(
            """
            INSERT INTO queue(run_id, group_id, part, gen, share, oldest_version, chain_lengths,
                members)
            SELECT g.run_id, g.group_id, %(part)s, g.gen, g.share,
                min(coalesce(a.oldest_version, a.pinned_version, a.submitted_version)),
                coalesce(array_agg(l.n ORDER BY a.sample, l.i) FILTER (WHERE l.n IS NOT NULL), '{}'),
                count(DISTINCT a.sample)
            FROM groups g JOIN attempts a USING (run_id, group_id)
            LEFT JOIN LATERAL unnest(a.chain_lengths) WITH ORDINALITY AS l(n, i) ON true
            WHERE g.run_id = %(run)s AND g.group_id = %(group)s AND a.member AND a.part = %(part)s
            GROUP BY g.run_id, g.group_id, g.gen, g.share
            """,
            {"run": run, "group": group, "part": part},
        )
    return members
