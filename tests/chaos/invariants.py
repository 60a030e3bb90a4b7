"""What must hold when a run has ended, whatever was done to it: I3 to I10 of the failure plan.

I1 and I2, the ledger's own, are `tests.ledger_fixtures.check_invariants`; I6 is an audit of the run.
"""

from typing import TYPE_CHECKING

from storage import manifests

if TYPE_CHECKING:
    from tests.chaos.stage import Stage


def check_tokens(stage: "Stage") -> None:
    """I9: what an attempt says it sampled is what its segments hold, fences never go back."""
    wrong = stage.query(
        """
        SELECT a.group_id, a.sample, a.attempt, a.policy_tokens, s.tokens, s.fences
        FROM attempts a LEFT JOIN LATERAL (
            SELECT coalesce(sum(tokens), 0) AS tokens, array_agg(fence ORDER BY seq) AS fences,
                array_agg(seq ORDER BY seq) AS seqs
            FROM segments s WHERE (s.run_id, s.group_id, s.sample, s.attempt)
                = (a.run_id, a.group_id, a.sample, a.attempt)) s ON true
        WHERE a.run_id = %s AND (a.policy_tokens <> s.tokens
            OR s.fences <> (SELECT array_agg(f ORDER BY f) FROM unnest(s.fences) f)
            OR s.seqs <> (SELECT array_agg(n - 1 ORDER BY n)
                FROM generate_series(1, cardinality(s.seqs)) n))
        """,
        stage.run,
    )
    assert wrong == []


def check_failures(stage: "Stage", text: str | None) -> None:
    """I7, I10: nothing that the platform did is a failure, nothing is cancelled but surplus."""
    counted = stage.query(
        "SELECT group_id, sample, attempt, status, resubmitted_as, error FROM attempts "
        "WHERE run_id = %s AND counts_as_failure",
        stage.run,
    )
    assert all(text is not None and text in str(row["error"]) for row in counted), counted
    closed = stage.query(
        "SELECT group_id, state, closed_cause FROM groups WHERE run_id = %s AND state IN "
        "('cancelled', 'abandoned', 'expired') AND closed_cause NOT IN ('surplus', 'human')",
        stage.run,
    )
    assert closed == []


def check_objects(stage: "Stage") -> None:
    """I8: every object that the ledger names is there and is what the ledger says."""
    named = stage.query(
        "SELECT s3_prefix || '/manifest.json' AS key, manifest_sha256 AS sha FROM checkpoints "
        "WHERE run_id = %(run)s AND state = 'durable' UNION ALL SELECT weights_key, "
        "weights_sha256 FROM policy_versions WHERE run_id = %(run)s AND weights_key IS NOT NULL "
        "AND state <> 'deleted'".replace("%(run)s", "%s"),
        stage.run,
        stage.run,
    )
    for row in named:
        manifest = manifests.read(stage.store, row["key"], sha256=bytes(row["sha"]).hex())
        prefix = row["key"].removesuffix("manifest.json")
        for name, file in manifest.files.items():
            stage.store.get(prefix + name, sha256=file.sha256)


def check_plans(stage: "Stage") -> None:
    """E4: no part of a group is trained twice, and under `dataset` in the data's order."""
    rows = stage.query(
        "SELECT q.step, q.pos, q.group_id, q.part, g.batch FROM queue q "
        "JOIN groups g USING (run_id, group_id) WHERE q.run_id = %s AND q.step IS NOT NULL "
        "ORDER BY q.step, q.share, q.pos",
        stage.run,
    )
    parts = [(row["group_id"], row["part"]) for row in rows]
    assert len(parts) == len(set(parts))
    if stage.config.schedule.order == "dataset":
        assert all(row["batch"] == row["step"] for row in rows)
        assert parts == sorted(parts)
