"""Digests of what a step trained on, so that an audit can name the group that is not what it was.

Taken by Postgres over the very rows that the trainer reads (`segments.members`), when the step is
applied: a rollout is not changed after that, and if it is, its group's digest says so.
"""

from collections.abc import Mapping

from storage.database import Tx


def digests(tx: Tx, run: str, step: int) -> Mapping[str, str]:
    """SHA-256, in hex, of each part that a step trains, by `group.part`: its members and tokens."""
    rows = tx.execute(
        """
        SELECT q.group_id || '.' || q.part AS part, encode(pg_catalog.sha256(string_agg(m.digest, ''
            ORDER BY m.sample)), 'hex') AS digest
        FROM queue q, LATERAL (
            SELECT a.sample, pg_catalog.sha256(convert_to(concat_ws(' ', a.sample, a.attempt, a.status,
                    a.reward, a.truncation), 'UTF8') || coalesce((
                SELECT string_agg(pg_catalog.sha256(convert_to(concat_ws(' ', s.seq, s.turn, s.chain,
                    s.context_start, s.version_spans, s.oldest_version, s.finish_reason,
                    nullif(s.images, '{}'),
                    nullif(s.image_places, '{}')), 'UTF8')
                    || coalesce(s.prompt_delta, '') || coalesce(s.sampled_ids, '')
                    || coalesce(s.logprobs, '') || coalesce(s.support_ids, '')
                    || coalesce(s.support_counts, '')), '' ORDER BY s.seq)
                FROM segments s WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                    = (a.run_id, a.group_id, a.sample, a.attempt)), '')) AS digest
            FROM attempts a WHERE (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part)
                AND a.member) m
        WHERE q.run_id = %s AND q.step = %s GROUP BY q.group_id, q.part ORDER BY 1
        """,
        (run, step),
    ).fetchall()
    return {row["part"]: row["digest"] for row in rows}
