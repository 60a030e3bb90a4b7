"""What does not move, as far as the ledger knows: silent attempts, and the parts a run waits for."""

from dataclasses import dataclass

from storage.database import Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A live attempt and how long nothing was heard of it."""

    run: str
    group: int
    sample: int
    attempt: int
    state: str  # submitted or running
    cancel_cause: str | None
    worker: str | None
    engine: str | None
    turns: int
    tokens: int
    version: int | None  # pinned; None while queued
    silent_s: float
    age_s: float
    batch: int
    gen: int  # of its group
    workflow_id: str
    environment: str
    begun: bool  # the group's workflow has claimed it
    tries: int | None  # deliveries of the workflow's start so far; None once it is delivered
    delivery_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run that its rollouts and its trainer depend on."""

    state: str
    environment: str
    step: int
    batch_size: int
    holder: str | None
    lease_left_s: float | None  # below 0: nobody trains the run
    queued: int  # attempts that no worker has taken
    oldest_queued_s: float | None  # of those whose group has begun
    moving: int  # attempts that made progress in the last seconds
    waiting_groups: int  # submitted and delivered, but no workflow has begun
    oldest_waiting_s: float | None
    undelivered: int  # commands for Temporal
    oldest_undelivered_s: float | None
    delivery_error: str | None
    set_aside: int  # commands that were refused again and again
    oldest_set_aside_s: float | None
    refusal: str | None  # which, and what was said, of the newest
    engines: int
    engines_alive: int
    engine_seen_s: float | None  # seconds since the last one was seen
    version: int
    served: int | None
    publishing: int | None  # version that loads or waits to
    publish_due: bool
    publishing_for_s: float | None
    publish_held_by: str | None
    lacking: tuple[str, ...]  # live engines that have not acknowledged it


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfStep:
    """One share of the data and the next step, which is computed when every share has planned it."""

    share: int
    planned: bool
    error: str | None  # why it could not plan
    ready: int  # groups of it
    sampling: int
    ended: bool  # nothing is left of its data
    slack: int | None
    binding_deadline: int | None
    binding_groups: tuple[int, ...]  # the sampling groups that are due by it, oldest first


def attempts(
    tx: Tx, run: str, *, silent_s: float | None = None, group: int | None = None, limit: int = 1000
) -> list[Idle]:
    """Live attempts, longest silent first.

    Args:
        tx: transaction.
        run: run id.
        silent_s: seconds without progress that count; default: the run's `groups.stuck_after`.
        group: of this group alone.
        limit: at most so many.
    """
    rows = tx.execute(
        """
        SELECT a.run_id AS run, a.group_id AS group, a.sample, a.attempt, a.state, a.cancel_cause,
            a.worker, a.engine_id AS engine, a.turns, a.policy_tokens AS tokens,
            coalesce(a.sampling_version, a.pinned_version) AS version,
            extract(epoch FROM now() - coalesce(a.last_progress_at, a.submitted_at))::float8
                AS silent_s,
            extract(epoch FROM now() - a.submitted_at)::float8 AS age_s,
            g.batch, g.gen, g.workflow_id, g.begun_at IS NOT NULL AS begun,
            r.config #>> '{run,tasks,environment}' AS environment, o.tries,
            o.last_error AS delivery_error
        FROM attempts a JOIN groups g USING (run_id, group_id) JOIN runs r USING (run_id)
            LEFT JOIN outbox o ON o.run_id = g.run_id AND o.kind = 'start_group'
                AND o.key = g.workflow_id AND o.done_at IS NULL
        WHERE a.run_id = %(run)s AND a.state IN ('submitted', 'running')
            AND g.workflow_id IS NOT NULL AND (%(group)s::bigint IS NULL OR a.group_id = %(group)s)
            AND coalesce(a.last_progress_at, a.submitted_at)
                <= now() - coalesce(make_interval(secs => %(silent)s), r.stuck_after)
        ORDER BY silent_s DESC, a.group_id, a.sample LIMIT %(limit)s
        """,
        {"run": run, "silent": silent_s, "group": group, "limit": limit},
    ).fetchall()
    return [Idle(**row) for row in rows]


def parts(tx: Tx, run: str) -> Parts:
    """The parts of a run; the run must exist."""
    row = tx.execute(
        """
        SELECT r.state, r.config #>> '{run,tasks,environment}' AS environment, r.next_step AS step,
            r.batch_size, r.trainer_holder AS holder,
            extract(epoch FROM r.trainer_lease_until - now())::float8 AS lease_left_s,
            r.version, w.served, w.publish_due, w.publish_held_by, a.*, g.*, u.*, i.*, e.*, p.*,
            coalesce((SELECT array_agg(n.engine_id ORDER BY n.engine_id) FROM engines n
                WHERE n.run_id = r.run_id AND n.alive_until > now() AND NOT EXISTS (
                    SELECT 1 FROM engine_versions v WHERE (v.run_id, v.engine_id, v.version,
                        v.incarnation) = (n.run_id, n.engine_id, p.publishing, n.incarnation))),
                '{}') AS lacking
        FROM runs r JOIN waiting w ON w.run_id = r.run_id AND w.share = 0
        CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE t.state = 'submitted') AS queued,
            count(*) FILTER (WHERE t.state = 'running'
                AND t.last_progress_at > now() - interval '10 s') AS moving,
            extract(epoch FROM now() - min(t.submitted_at) FILTER (WHERE t.state = 'submitted'
                AND b.begun_at IS NOT NULL))::float8 AS oldest_queued_s
            FROM attempts t JOIN groups b USING (run_id, group_id)
            WHERE t.run_id = r.run_id AND t.state IN ('submitted', 'running')) a
        CROSS JOIN LATERAL (SELECT count(*) AS waiting_groups,
            extract(epoch FROM now() - min(s.submitted_at))::float8 AS oldest_waiting_s
            FROM groups s WHERE s.run_id = r.run_id AND s.state = 'submitted'
                AND s.begun_at IS NULL AND NOT EXISTS (SELECT 1 FROM outbox o
                    WHERE (o.run_id, o.kind, o.key) = (s.run_id, 'start_group', s.workflow_id)
                        AND o.done_at IS NULL)) g
        CROSS JOIN LATERAL (SELECT count(*) AS undelivered,
            extract(epoch FROM now() - min(o.created_at))::float8 AS oldest_undelivered_s,
            (array_agg(o.last_error ORDER BY o.id) FILTER (WHERE o.last_error IS NOT NULL))[1]
                AS delivery_error
            FROM outbox o
            WHERE o.run_id = r.run_id AND o.done_at IS NULL AND o.set_aside_at IS NULL) u
        CROSS JOIN LATERAL (SELECT count(*) AS set_aside,
            extract(epoch FROM now() - min(o.set_aside_at))::float8 AS oldest_set_aside_s,
            (array_agg(concat(o.kind, ' ', o.key, ': ', o.last_error) ORDER BY o.id DESC))[1] AS refusal
            FROM outbox o
            WHERE o.run_id = r.run_id AND o.done_at IS NULL AND o.set_aside_at IS NOT NULL) i
        CROSS JOIN LATERAL (SELECT count(*) AS engines,
            count(*) FILTER (WHERE n.alive_until > now()) AS engines_alive,
            extract(epoch FROM now() - max(n.alive_until))::float8 AS engine_seen_s
            FROM engines n WHERE n.run_id = r.run_id) e
        LEFT JOIN LATERAL (SELECT v.version AS publishing,
            extract(epoch FROM now() - coalesce(v.held_since, v.uploaded_at))::float8
                AS publishing_for_s
            FROM policy_versions v WHERE v.run_id = r.run_id AND v.version > coalesce(w.served, -1)
                AND v.state IN ('computed', 'uploaded', 'loading')
            ORDER BY v.version DESC LIMIT 1) p ON true
        WHERE r.run_id = %s
        """,
        (run,),
    ).fetchone()
    assert row is not None
    return Parts(**row | {"lacking": tuple(row["lacking"])})


def shares(tx: Tx, run: str) -> list[ShareOfStep]:
    """Every share of a run and what it has of the next step, in order."""
    rows = tx.execute(
        """
        SELECT w.share, coalesce(p.state = 'planned', false) AS planned, p.error, w.ready,
            w.running AS sampling, w.slack, w.binding_deadline,
            s.data_end IS NOT NULL AND w.ready + w.running + w.registered = 0 AS ended,
            coalesce((SELECT array_agg(x.group_id ORDER BY x.version, x.group_id)
                FROM outstanding x WHERE (x.run_id, x.share) = (w.run_id, w.share) AND NOT x.ready
                AND x.version + r.max_lag <= w.binding_deadline), '{}') AS binding_groups
        FROM waiting w JOIN runs r USING (run_id) JOIN shares s USING (run_id, share)
        LEFT JOIN step_shares p ON (p.run_id, p.step, p.share) = (w.run_id, w.next_step, w.share)
        WHERE w.run_id = %s ORDER BY w.share
        """,
        (run,),
    ).fetchall()
    return [ShareOfStep(**row | {"binding_groups": tuple(row["binding_groups"])}) for row in rows]
