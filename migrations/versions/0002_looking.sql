-- Views that answer people's questions; beside them, reward_by_version tells the environment.
SET LOCAL search_path = ledger;
CREATE INDEX attempts_finished ON attempts USING brin(finished_at) WITH (pages_per_range = 32);   -- rows come in the order of time
DROP VIEW reward_by_version;
CREATE VIEW reward_by_version AS SELECT m.*, r.config #>> '{run,tasks,environment}' AS environment FROM (SELECT run_id, coalesce(oldest_version, pinned_version, submitted_version) AS version, count(*) AS n,
  avg(reward) AS mean, stddev_samp(reward) AS sd, avg((status = 'truncated')::int) AS truncated FROM attempts WHERE member GROUP BY 1, 2) m JOIN runs r USING (run_id);
CREATE VIEW task_balance AS SELECT g.run_id, g.task_id, count(*) AS drawn, count(*) FILTER (WHERE p.place IN ('submitted','queue')) AS open, count(*) FILTER (WHERE p.place = 'trained') AS trained,
    coalesce(sum(s.stale), 0) AS stale, count(*) FILTER (WHERE p.place = 'cut') AS cut, count(*) FILTER (WHERE p.place = 'cancelled') AS cancelled, count(*) FILTER (WHERE p.place = 'abandoned') AS abandoned,
    count(*) FILTER (WHERE p.place = 'expired') AS expired, count(*) FILTER (WHERE p.place = 'quarantined') AS quarantined, count(*) FILTER (WHERE p.place IN ('registered','submitted','queue')) AS owed
  FROM groups g JOIN group_place p USING (run_id, group_id)                   -- stale: rollouts that grew too old and were sampled again
  LEFT JOIN (SELECT run_id, group_id, count(*) AS stale FROM attempts WHERE resubmitted_as = 'stale' GROUP BY 1, 2) s USING (run_id, group_id) GROUP BY 1, 2;
CREATE VIEW task_failures AS SELECT a.run_id, g.task_id, a.resubmitted_as AS cause, a.status, a.error_type, a.state = 'lost' AS lost, a.counts_as_failure, count(*) AS n, count(DISTINCT a.group_id) AS groups,
    count(DISTINCT a.group_id) FILTER (WHERE g.state = 'abandoned') AS abandoned, max(a.finished_at) AS last_at, (array_agg(left(a.error, 500) ORDER BY a.finished_at DESC) FILTER (WHERE a.error IS NOT NULL))[1] AS last_error
  FROM attempts a JOIN groups g USING (run_id, group_id) WHERE a.counts_as_failure OR a.state = 'lost' GROUP BY 1, 2, 3, 4, 5, 6, 7;
CREATE VIEW wasted_tokens AS SELECT run_id, cause, count(*) AS rollouts, sum(policy_tokens) AS policy_tokens, sum(env_tokens) AS env_tokens FROM (
  SELECT a.run_id, CASE WHEN a.resubmitted_as IS NOT NULL THEN a.resubmitted_as::text WHEN a.surplus THEN 'surplus' WHEN p.place IN ('cut','cancelled','abandoned','expired') THEN p.place
      ELSE coalesce(a.cancel_cause, a.status::text) END AS cause, a.policy_tokens, a.env_tokens FROM attempts a JOIN group_place p USING (run_id, group_id) WHERE a.status IS NOT NULL AND NOT a.member
  UNION ALL SELECT a.run_id, p.place, a.policy_tokens, a.env_tokens FROM group_place p JOIN attempts a USING (run_id, group_id) WHERE a.member AND p.place IN ('cut','cancelled','abandoned','expired')) w GROUP BY 1, 2;
CREATE VIEW trained_rollouts AS SELECT q.run_id, q.step, q.pos, q.group_id, q.part, g.task_id, a.sample, a.attempt, s.version_before AS trained_at, a.oldest_version, a.newest_version, q.lag, a.status, a.truncation, a.reward,
    a.turns, a.policy_tokens, a.submitted_at, a.started_at, a.finished_at, q.admitted_at, s.applied_at
  FROM queue q JOIN steps s USING (run_id, step) JOIN groups g USING (run_id, group_id) JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member WHERE q.step IS NOT NULL;
CREATE VIEW step_times AS SELECT t.run_id, t.step, t.state, t.version_before, t.updated, t.groups, t.cause, t.planned_at, t.applied_at, t.replays,
    extract(epoch FROM t.applied_at - coalesce(lag(t.applied_at) OVER w, t.planned_at))::float8 AS seconds, (t.metrics ->> 'time/compute_s')::float8 AS compute_s, p.waited_s,
    (p.record #>> '{waited_for,groups}')::float8 AS waited_groups_s, (p.record #>> '{waited_for,hold}')::float8 AS waited_hold_s, (p.record #>> '{waited_for,publish}')::float8 AS waited_publish_s,
    (p.record #>> '{waited_for,resident_limit}')::float8 AS waited_resident_limit_s, (p.record #>> '{waited_for,storage}')::float8 AS waited_storage_s, (p.record #>> '{waited_for,paused}')::float8 AS waited_paused_s
  FROM steps t LEFT JOIN step_shares p ON (p.run_id, p.step, p.share) = (t.run_id, t.step, 0) WINDOW w AS (PARTITION BY t.run_id ORDER BY t.step);
