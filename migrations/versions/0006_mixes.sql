-- Mixes of environments: each group knows its own. Versions kept for an evaluation while others are trained.
SET LOCAL search_path = ledger;
ALTER TABLE groups ADD COLUMN environment text NOT NULL DEFAULT 'default';
ALTER TABLE groups DISABLE TRIGGER groups_guard;   -- it would make every group of the past one that has just changed
UPDATE groups g SET environment = r.config #>> '{run,tasks,environment}' FROM runs r WHERE r.run_id = g.run_id AND r.config #>> '{run,tasks,environment}' <> 'default';
ALTER TABLE groups ENABLE TRIGGER groups_guard;
CREATE TABLE evaluation_pins(run_id text NOT NULL, version policy_version NOT NULL, at timestamptz NOT NULL DEFAULT now(),   -- versions kept for a held-out evaluation, as long as no publication needs the slot
  PRIMARY KEY(run_id, version), FOREIGN KEY(run_id, version) REFERENCES policy_versions);
CREATE OR REPLACE VIEW reward_by_version AS SELECT a.run_id, coalesce(a.oldest_version, a.pinned_version, a.submitted_version) AS version, count(*) AS n,
  avg(a.reward) AS mean, stddev_samp(a.reward) AS sd, avg((a.status = 'truncated')::int) AS truncated, g.environment FROM attempts a JOIN groups g USING (run_id, group_id) WHERE a.member GROUP BY 1, 2, 7;
CREATE OR REPLACE VIEW version_pins AS SELECT v.run_id, v.version, v.state, count(a.run_id) + count(DISTINCT e.version) AS pins FROM policy_versions v LEFT JOIN attempts a ON a.run_id = v.run_id AND a.state = 'running'
  AND v.version IN (CASE WHEN a.sampling_version IS NULL THEN a.pinned_version END, a.sampling_version, a.kv_version) LEFT JOIN evaluation_pins e ON (e.run_id, e.version) = (v.run_id, v.version) GROUP BY 1, 2, 3;
CREATE VIEW reward_by_step AS SELECT q.run_id, q.step, g.environment, count(DISTINCT q.group_id) AS groups, count(*) AS n, avg(a.reward) AS mean, stddev_samp(a.reward) AS sd, sum(a.policy_tokens) AS policy_tokens
  FROM queue q JOIN groups g USING (run_id, group_id) JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member WHERE q.step IS NOT NULL GROUP BY 1, 2, 3;
CREATE VIEW evaluation_by_version AS SELECT run_id, name, version, count(*) AS n, avg(reward) AS mean, stddev_samp(reward) AS sd, avg(coalesce(reward >= 1, false)::int) AS solved,
  avg((status = 'truncated')::int) AS truncated, min(at) AS at FROM evaluations GROUP BY 1, 2, 3;
