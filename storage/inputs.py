"""Digests of what a step trained on, so that an audit can name the input that is not what it was.

Taken by Postgres over the very rows that the trainer reads (`segments.members`), when the step is
applied: a rollout is not changed after that, and if it is, its group's digests say so, and in what.
"""

from collections.abc import Mapping

from storage.database import Tx

KINDS = {
    "tokens": "tokens",
    "logprobs": "log-probabilities",
    "versions": "policy versions",
    "verdicts": "rewards and statuses",
}
"""What is digested of a group's members, and how to speak of it."""


def digests(tx: Tx, run: str, step: int) -> Mapping[str, Mapping[str, str]]:
    """SHA-256, in hex, of each of `KINDS` of each part that a step trains, by `group.part`."""
    rows = tx.execute(
        """
        SELECT q.group_id || '.' || q.part AS part,
            encode(pg_catalog.sha256(string_agg(m.tokens, '' ORDER BY m.sample)), 'hex') AS tokens,
            encode(pg_catalog.sha256(string_agg(m.logprobs, '' ORDER BY m.sample)), 'hex') AS logprobs,
            encode(pg_catalog.sha256(string_agg(m.versions, '' ORDER BY m.sample)), 'hex') AS versions,
            encode(pg_catalog.sha256(string_agg(m.verdict, '' ORDER BY m.sample)), 'hex') AS verdicts
        FROM queue q, LATERAL (
            SELECT a.sample, pg_catalog.sha256(convert_to(concat_ws(' ', a.sample, a.attempt,
                    a.status, a.reward, a.truncation), 'UTF8')) AS verdict,
                coalesce(s.tokens, '') AS tokens, coalesce(s.logprobs, '') AS logprobs,
                coalesce(s.versions, '') AS versions
            FROM attempts a, LATERAL (
                SELECT string_agg(pg_catalog.sha256(convert_to(concat_ws(' ', s.seq, s.turn, s.chain,
                            s.context_start, s.finish_reason, nullif(s.images, '{}'),
                            nullif(s.image_places, '{}')), 'UTF8')
                        || coalesce(s.prompt_delta, '') || coalesce(s.sampled_ids, '')),
                        '' ORDER BY s.seq) AS tokens,
                    string_agg(pg_catalog.sha256(coalesce(s.logprobs, '')
                        || coalesce(s.support_ids, '') || coalesce(s.support_counts, '')),
                        '' ORDER BY s.seq) AS logprobs,
                    string_agg(pg_catalog.sha256(convert_to(concat_ws(' ', s.version_spans,
                        s.oldest_version), 'UTF8')), '' ORDER BY s.seq) AS versions
                FROM segments s WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                    = (a.run_id, a.group_id, a.sample, a.attempt)) s
            WHERE (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member) m
        WHERE q.run_id = %s AND q.step = %s GROUP BY q.group_id, q.part ORDER BY 1
        """,
        (run, step),
    ).fetchall()
    return {row["part"]: {kind: row[kind] for kind in KINDS} for row in rows}
