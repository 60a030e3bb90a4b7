-- rollbook ledger: the whole schema. PostgreSQL 15 or newer, no extension, no lz4.
-- Keys start with run_id. Status and enum values are lower case. Lock order: runs -> groups -> queue -> attempts, rows of
-- one table in key order, always FOR NO KEY UPDATE (foreign-key checks take KEY SHARE and must not conflict).
CREATE SCHEMA ledger;
SET LOCAL search_path = ledger;                                              -- apply it in one transaction: psql -1 -f
CREATE DOMAIN policy_version AS int CHECK (VALUE >= 0);
CREATE DOMAIN sha256 AS bytea CHECK (octet_length(VALUE) = 32);
CREATE TYPE rollout_status AS ENUM ('completed','truncated','agent_error','infra_error','cancelled');
CREATE TYPE resubmit_cause AS ENUM ('infra_error','cancelled','stale','timeout','unscored');
CREATE FUNCTION spans_ok(spans int[], n int, oldest int, newest int) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  -- version_spans = [version, tokens, version, tokens, ...]; the tokens add up to n, the versions lie in oldest..newest
  SELECT cardinality(spans) % 2 = 0 AND coalesce(bool_and(CASE WHEN i % 2 = 0 THEN x > 0 ELSE x BETWEEN oldest AND newest END), true)
     AND coalesce(sum(x) FILTER (WHERE i % 2 = 0), 0) = n FROM unnest(spans) WITH ORDINALITY AS u(x, i) $$;

-- ---------------------------------------------------------------- runs
CREATE TABLE runs(
  run_id text PRIMARY KEY CHECK (run_id ~ '^[a-z0-9][a-z0-9._-]{0,62}$'),
  parent text REFERENCES runs, forked_at int CHECK (forked_at >= 0),        -- a rewind is a fork: step of the parent's checkpoint
  first_step int NOT NULL DEFAULT 0 CHECK (first_step >= 0), first_version policy_version NOT NULL DEFAULT 0,
  config jsonb NOT NULL, config_sha256 sha256 NOT NULL, seed bigint NOT NULL, shares int NOT NULL DEFAULT 1 CHECK (shares >= 1),
  batch_size int NOT NULL CHECK (batch_size >= 1),                          -- B: groups a step, of one share
  admit int NOT NULL CHECK (admit >= 1), group_size int NOT NULL CHECK (group_size >= 1),
  oversample int NOT NULL DEFAULT 0 CHECK (oversample >= 0),
  "order" text NOT NULL DEFAULT 'dataset' CHECK ("order" IN ('dataset','deadline','admission')),   -- reserved word: quote it
  overflow text NOT NULL DEFAULT 'cut' CHECK (overflow IN ('cut','accumulate')),
  ahead int NOT NULL DEFAULT 1 CHECK (ahead >= 0), sync_every int NOT NULL DEFAULT 1 CHECK (sync_every >= 1),
  max_lag int NOT NULL DEFAULT 1 CHECK (max_lag >= 0),
  max_attempts int NOT NULL DEFAULT 3 CHECK (max_attempts >= 1), max_stale int NOT NULL DEFAULT 5 CHECK (max_stale >= 1),
  max_losses int NOT NULL DEFAULT 20 CHECK (max_losses >= 1), max_empty_batches int NOT NULL DEFAULT 3 CHECK (max_empty_batches >= 0),
  timeout_s double precision CHECK (timeout_s > 0), max_generated_tokens bigint CHECK (max_generated_tokens > 0),
  stale_policy text NOT NULL DEFAULT 'resubmit' CHECK (stale_policy IN ('resubmit','wait','mask_span','keep')),
  completion text NOT NULL DEFAULT 'wait' CHECK (completion IN ('wait','deadline')),
  min_members int CHECK (min_members >= 1), max_straggler_tokens bigint CHECK (max_straggler_tokens >= 0),
  on_stragglers text CHECK (on_stragglers IN ('truncate','discard','carry_over')),
  sampling_policy text NOT NULL DEFAULT 'trajectory' CHECK (sampling_policy IN ('trajectory','segment')),
  kv_max_staleness int NOT NULL DEFAULT 0 CHECK (kv_max_staleness >= 0),
  kv_on_limit text NOT NULL DEFAULT 'hold' CHECK (kv_on_limit IN ('hold','refill')), allow_reprefill bool NOT NULL DEFAULT false,
  estimator text NOT NULL DEFAULT 'group' CHECK (estimator IN ('group','mean','rloo','batch')), importance jsonb,
  truncation text NOT NULL DEFAULT 'mask' CHECK (truncation IN ('mask','score','zero','drop')),
  truncation_by_cause jsonb NOT NULL DEFAULT '{}', has_verifier bool NOT NULL DEFAULT true,
  on_reopen text NOT NULL DEFAULT 'adopt' CHECK (on_reopen IN ('adopt','cancel')),
  on_resident_limit text NOT NULL DEFAULT 'hold' CHECK (on_resident_limit IN ('hold','cancel')),
  exact text NOT NULL DEFAULT 'bits' CHECK (exact IN ('bits','order')),
  checkpoint_every int NOT NULL DEFAULT 1 CHECK (checkpoint_every >= 1),     -- K, in steps
  allow_trajectory_loss bool NOT NULL DEFAULT false, allow_unbounded_staleness bool NOT NULL DEFAULT false,
  stuck_after interval NOT NULL DEFAULT '5 minutes' CHECK (stuck_after > '0'),
  -- state
  version policy_version NOT NULL DEFAULT 0,                                 -- c: optimizer updates applied
  next_step int NOT NULL DEFAULT 0,                                          -- first step that is not applied
  durable_step int,                                                          -- newest durable checkpoint; null until the first exists
  empty_from int NOT NULL DEFAULT 0,                                         -- empty steps count from here; set by the resume of a failed run
  resumed_at timestamptz NOT NULL DEFAULT now(),                             -- groups that ended unadmitted count from here; set likewise
  trainer_epoch bigint NOT NULL DEFAULT 0, trainer_holder text, trainer_lease_until timestamptz,   -- fencing token; lease on the server's clock
  state text NOT NULL DEFAULT 'creating' CHECK (state IN ('creating','running','paused','closing','closed','failed','finished')),
  failure text, created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT fork_complete CHECK ((parent IS NULL) = (forked_at IS NULL)), CONSTRAINT fork_starts CHECK (forked_at IS NULL OR forked_at = first_step),
  CONSTRAINT root_starts_at_zero CHECK (parent IS NOT NULL OR (first_step = 0 AND first_version = 0)),
  CONSTRAINT version_counts CHECK (version >= first_version AND version - first_version <= next_step - first_step),
  CONSTRAINT durable_not_ahead CHECK (durable_step IS NULL OR durable_step BETWEEN first_step AND next_step),
  CONSTRAINT durable_before_work CHECK (state IN ('creating','failed') OR durable_step IS NOT NULL),
  CONSTRAINT failed_says_why CHECK ((state = 'failed') <= (failure IS NOT NULL)),
  -- settings that cannot hold together (durability.md 5.6)
  CONSTRAINT v1_bound CHECK (stale_policy IN ('mask_span','keep') OR ahead + sync_every - 1 <= max_lag),
  CONSTRAINT v2_mask_span CHECK (stale_policy <> 'mask_span' OR allow_trajectory_loss),
  CONSTRAINT v3_keep CHECK (stale_policy <> 'keep' OR allow_unbounded_staleness),
  CONSTRAINT v4_deadline CHECK (completion = 'wait' OR (on_stragglers IS NOT NULL AND min_members IS NOT NULL AND max_straggler_tokens IS NOT NULL)),
  CONSTRAINT v4_members CHECK (min_members IS NULL OR completion = 'wait' OR min_members <= group_size),
  CONSTRAINT v5_partial CHECK (completion = 'wait' OR on_stragglers = 'truncate' OR stale_policy IN ('mask_span','keep')),
  CONSTRAINT v6_loss CHECK (completion = 'wait' OR on_stragglers = 'carry_over' OR allow_trajectory_loss),
  CONSTRAINT v7_carry_over CHECK (completion = 'wait' OR on_stragglers <> 'carry_over' OR ("order" <> 'dataset' AND estimator = 'batch' AND ahead >= 1)),
  CONSTRAINT v8_segment CHECK (sampling_policy = 'trajectory' OR kv_max_staleness > 0 OR kv_on_limit = 'refill'),
  CONSTRAINT v8_refill CHECK (kv_on_limit <> 'refill' OR allow_reprefill),
  CONSTRAINT v8_trajectory CHECK (sampling_policy = 'segment' OR (kv_max_staleness = 0 AND kv_on_limit = 'hold' AND NOT allow_reprefill)),
  CONSTRAINT v9_wait_ends CHECK (stale_policy <> 'wait' OR timeout_s IS NOT NULL OR max_generated_tokens IS NOT NULL),
  CONSTRAINT v9_wait_whole CHECK (stale_policy <> 'wait' OR overflow = 'accumulate'),
  CONSTRAINT v9_wait_order CHECK (stale_policy <> 'wait' OR "order" = 'deadline' OR ("order" = 'dataset' AND ahead = 0)),
  CONSTRAINT v10_admit CHECK (admit <= batch_size AND (admit = batch_size OR "order" = 'dataset')),
  CONSTRAINT v10_group CHECK (estimator NOT IN ('group','rloo') OR group_size >= 2),
  CONSTRAINT v11_score CHECK (has_verifier OR NOT (truncation = 'score' OR truncation_by_cause @? '$.* ? (@ == "score")')),
  CONSTRAINT v13_cut CHECK (overflow <> 'cut' OR "order" = 'dataset'),
  CONSTRAINT v14_exact CHECK (exact = 'bits' OR checkpoint_every = 1),
  CONSTRAINT v15_importance CHECK (max_lag = 0 OR importance IS NOT NULL));
CREATE TABLE shares(run_id text NOT NULL REFERENCES runs, share int NOT NULL CHECK (share >= 0),
  handed_over int NOT NULL DEFAULT -1, data_end int CHECK (data_end >= 0),   -- number of batches; null until the data ended
  PRIMARY KEY(run_id, share));
CREATE TABLE task_batches(run_id text NOT NULL, batch int NOT NULL CHECK (batch >= 0), share int NOT NULL,
  tasks int NOT NULL CHECK (tasks >= 1), groups int NOT NULL CHECK (groups BETWEEN 0 AND tasks),   -- in the data; drawn by this run
  data_position jsonb NOT NULL, content_sha256 sha256 NOT NULL, registered_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY(run_id, batch, share), FOREIGN KEY(run_id, share) REFERENCES shares);

-- ---------------------------------------------------------------- versions, engines, checkpoints
CREATE TABLE policy_versions(run_id text NOT NULL REFERENCES runs, version policy_version NOT NULL,
  weights_sha256 sha256 NOT NULL, weights_key text, weights_bytes bigint CHECK (weights_bytes > 0), probe jsonb,   -- probe: fixed log-probabilities (drift)
  state text NOT NULL CHECK (state IN ('computed','uploaded','loading','served','draining','retired','deleted')),
  trainer_epoch bigint NOT NULL, held_since timestamptz, held_by text, uploaded_at timestamptz, served_at timestamptz, retired_at timestamptz,
  PRIMARY KEY(run_id, version), CHECK (state = 'computed' OR weights_key IS NOT NULL),
  CHECK (state NOT IN ('served','draining') OR served_at IS NOT NULL), CHECK ((held_since IS NULL) = (held_by IS NULL)));
CREATE TABLE engines(run_id text NOT NULL REFERENCES runs, engine_id text NOT NULL, incarnation bigint NOT NULL,
  max_resident int NOT NULL DEFAULT 1 CHECK (max_resident >= 1), alive_until timestamptz NOT NULL, PRIMARY KEY(run_id, engine_id));
CREATE TABLE engine_versions(run_id text NOT NULL, engine_id text NOT NULL, version policy_version NOT NULL, incarnation bigint NOT NULL,
  weights_sha256 sha256 NOT NULL, acked_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY(run_id, engine_id, version),
  FOREIGN KEY(run_id, engine_id) REFERENCES engines ON DELETE CASCADE, FOREIGN KEY(run_id, version) REFERENCES policy_versions);
CREATE TABLE checkpoints(run_id text NOT NULL REFERENCES runs, step int NOT NULL CHECK (step >= 0),   -- steps < step are in it; step is the next
  version policy_version NOT NULL, s3_prefix text NOT NULL, manifest_sha256 sha256 NOT NULL, bytes bigint NOT NULL CHECK (bytes > 0),
  data_position jsonb NOT NULL, rng jsonb NOT NULL, world jsonb NOT NULL, trainer_epoch bigint NOT NULL, tag text,
  state text NOT NULL DEFAULT 'durable' CHECK (state IN ('durable','retiring','deleted')), created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY(run_id, step), UNIQUE(run_id, s3_prefix),                      -- a fork's first row names its parent's object
  FOREIGN KEY(run_id, version) REFERENCES policy_versions);
CREATE INDEX checkpoints_object ON checkpoints(s3_prefix) WHERE state <> 'deleted';

-- ---------------------------------------------------------------- groups and attempts
CREATE TABLE groups(run_id text NOT NULL, group_id bigint NOT NULL CHECK (group_id >= 0), batch int NOT NULL, share int NOT NULL,
  pos int NOT NULL CHECK (pos >= 0), task_id text NOT NULL, task jsonb NOT NULL, gen int NOT NULL DEFAULT 0 CHECK (gen >= 0),
  state text NOT NULL DEFAULT 'registered' CHECK (state IN ('registered','submitted','complete','abandoned','cancelled','expired','quarantined')),
  workflow_id text UNIQUE, begun_at timestamptz,                             -- of this gen; begun_at: begin_group ran
  submitted_version policy_version, submitted_at timestamptz, quorum_at timestamptz, deadline_reached_at timestamptz,
  losses int NOT NULL DEFAULT 0 CHECK (losses >= 0), closed_cause text, closed_step int, updated_at timestamptz NOT NULL DEFAULT now(), environment text NOT NULL DEFAULT 'default',
  PRIMARY KEY(run_id, group_id), UNIQUE(run_id, batch, share, pos),
  FOREIGN KEY(run_id, batch, share) REFERENCES task_batches, FOREIGN KEY(run_id, submitted_version) REFERENCES policy_versions(run_id, version),
  CONSTRAINT submitted_known CHECK (state <> 'submitted' OR (workflow_id IS NOT NULL AND submitted_version IS NOT NULL AND submitted_at IS NOT NULL)),
  CONSTRAINT registered_free CHECK (state NOT IN ('registered','quarantined') OR (workflow_id IS NULL AND begun_at IS NULL AND quorum_at IS NULL)),
  CONSTRAINT deadline_after_quorum CHECK (deadline_reached_at IS NULL OR quorum_at IS NOT NULL),
  CONSTRAINT closed_says_why CHECK ((state IN ('abandoned','cancelled','expired','quarantined')) = (closed_cause IS NOT NULL AND closed_step IS NOT NULL)));
CREATE INDEX groups_open ON groups(run_id, state, batch, pos) WHERE state IN ('registered','submitted');
CREATE INDEX groups_recent ON groups(updated_at);
CREATE TABLE quarantine(run_id text NOT NULL REFERENCES runs, task_id text NOT NULL, phase text NOT NULL, reason text NOT NULL, task_sha256 sha256 NOT NULL,
  at timestamptz NOT NULL DEFAULT now(), released_at timestamptz, PRIMARY KEY(run_id, task_id, at));
CREATE TABLE attempts(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL CHECK (sample >= 0), attempt int NOT NULL CHECK (attempt >= 0),
  gen int NOT NULL CHECK (gen >= 0),                                         -- generation that made it
  state text NOT NULL DEFAULT 'submitted' CHECK (state IN ('submitted','running','finished','lost')),   -- lost: the platform died under it
  status rollout_status, resubmitted_as resubmit_cause, counts_as_failure bool NOT NULL DEFAULT false, surplus bool NOT NULL DEFAULT false,
  fence bigint NOT NULL DEFAULT 0, worker text, engine_id text,
  submitted_version policy_version NOT NULL, pinned_version policy_version, oldest_version policy_version, newest_version policy_version,
  sampling_version policy_version, kv_version policy_version,                -- policy "segment": what it samples from, its cache's anchor; both are pins
  turns int NOT NULL DEFAULT 0, policy_tokens bigint NOT NULL DEFAULT 0, env_tokens bigint NOT NULL DEFAULT 0, tokens_at_quorum bigint,
  reward double precision, reward_parts jsonb, metrics jsonb, truncation text CHECK (truncation IN ('turns','tokens','turn_tokens','context','group_deadline','images','width')),
  chain_lengths int[], error_type text, error text,
  cancel_cause text CHECK (cancel_cause IN ('stale','surplus','timeout','close','reopen','abandon','deadline','resident_limit','human')), cancel_requested_at timestamptz,
  member bool NOT NULL DEFAULT false, part smallint CHECK (part IN (0, 1)),   -- member: set by the finish tx; part: by finish_group
  submitted_at timestamptz NOT NULL DEFAULT now(), started_at timestamptz, last_progress_at timestamptz, finished_at timestamptz,
  scheduled_at timestamptz,                                                  -- by Temporal: the execution that it belongs to
  PRIMARY KEY(run_id, group_id, sample, attempt), FOREIGN KEY(run_id, group_id) REFERENCES groups,
  FOREIGN KEY(run_id, pinned_version) REFERENCES policy_versions(run_id, version), FOREIGN KEY(run_id, submitted_version) REFERENCES policy_versions(run_id, version),
  CONSTRAINT ended CHECK ((state IN ('finished','lost')) = (status IS NOT NULL) AND (finished_at IS NULL) = (status IS NULL)),
  CONSTRAINT runs_under_a_version CHECK (state <> 'running' OR pinned_version IS NOT NULL),
  CONSTRAINT member_scorable CHECK (NOT member OR (status IN ('completed','truncated','agent_error') AND chain_lengths IS NOT NULL) IS TRUE),
  CONSTRAINT reward_finite CHECK (reward IS NULL OR (status IN ('completed','truncated','agent_error') AND reward NOT IN ('NaN','Infinity','-Infinity')) IS TRUE),
  CONSTRAINT scored CHECK (NOT member OR reward IS NOT NULL OR (status = 'truncated') IS TRUE),
  CONSTRAINT truncated_says_why CHECK ((status = 'truncated') IS TRUE = (truncation IS NOT NULL)),
  CONSTRAINT resubmitted_not_member CHECK (resubmitted_as IS NULL OR (NOT member AND status IS NOT NULL)),
  CONSTRAINT failure_kind CHECK (NOT counts_as_failure OR (status IS NOT NULL AND NOT member AND NOT surplus AND state <> 'lost' AND resubmitted_as IS DISTINCT FROM 'stale')),
  CONSTRAINT loss_kind CHECK (state <> 'lost' OR (status = 'infra_error') IS TRUE), CONSTRAINT part_of_member CHECK (part IS NULL OR member),
  CONSTRAINT version_order CHECK ((oldest_version IS NULL) = (newest_version IS NULL) AND coalesce(oldest_version <= newest_version, true)));
ALTER TABLE groups SET (fillfactor = 80); ALTER TABLE attempts SET (fillfactor = 80);
CREATE UNIQUE INDEX one_live_attempt ON attempts(run_id, group_id, sample) WHERE state IN ('submitted','running') AND cancel_cause IS NULL;
CREATE UNIQUE INDEX one_member ON attempts(run_id, group_id, sample) WHERE member;
CREATE INDEX attempts_live ON attempts(run_id, state) WHERE state IN ('submitted','running');
CREATE INDEX attempts_finished ON attempts USING brin(finished_at) WITH (pages_per_range = 32);   -- rows come in the order of time
CREATE TABLE segments(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL, attempt int NOT NULL, seq int NOT NULL CHECK (seq >= 0),
  turn int NOT NULL CHECK (turn >= 0), chain int NOT NULL CHECK (chain >= 0),
  context_start int NOT NULL CHECK (context_start >= 0),                     -- tokens of the chain so far that this prompt extends; 0 starts a chain
  prompt_tokens int NOT NULL CHECK (prompt_tokens >= 0), prompt_delta bytea NOT NULL, -- tool and environment tokens arrive here
  tokens int NOT NULL CHECK (tokens >= 0), sampled_ids bytea NOT NULL, logprobs bytea NOT NULL,  -- little-endian int32 / float32
  version_spans int[] NOT NULL, oldest_version policy_version NOT NULL, newest_version policy_version NOT NULL,
  kv_version policy_version NOT NULL, cached_prompt_tokens int NOT NULL DEFAULT 0 CHECK (cached_prompt_tokens >= 0),
  finish_reason text NOT NULL, engine_id text NOT NULL, fence bigint NOT NULL,
  support_ids bytea, support_counts bytea, images sha256[] NOT NULL DEFAULT '{}',   -- kept set of filtered sampling; digests in objects
  created_at timestamptz NOT NULL DEFAULT now(),
  image_places int[] NOT NULL DEFAULT '{}',                                  -- offset and length of each image in the whole prompt
  PRIMARY KEY(run_id, group_id, sample, attempt, seq), CONSTRAINT images_placed CHECK (cardinality(image_places) = 2*cardinality(images)),
  CONSTRAINT lengths CHECK (octet_length(prompt_delta) = 4*prompt_tokens AND octet_length(sampled_ids) = 4*tokens AND octet_length(logprobs) = 4*tokens),
  CONSTRAINT starts_with_prompt CHECK (context_start > 0 OR prompt_tokens > 0), CONSTRAINT cached CHECK (cached_prompt_tokens <= context_start + prompt_tokens),
  CONSTRAINT spans CHECK (oldest_version <= newest_version AND kv_version <= newest_version AND spans_ok(version_spans, tokens, oldest_version, newest_version)),
  CONSTRAINT support CHECK ((support_ids IS NULL) = (support_counts IS NULL) AND coalesce(octet_length(support_counts) = 4*tokens AND octet_length(support_ids) % 4 = 0, true))
) PARTITION BY LIST(run_id);
ALTER TABLE segments ALTER prompt_delta SET STORAGE EXTERNAL, ALTER sampled_ids SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL,
  ALTER support_ids SET STORAGE EXTERNAL, ALTER support_counts SET STORAGE EXTERNAL;
CREATE TABLE segments_default PARTITION OF segments DEFAULT;                 -- run creation adds a partition of its own
CREATE TABLE snapshots(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL, attempt int NOT NULL,
  segments int NOT NULL CHECK (segments >= 0), state jsonb NOT NULL,         -- what Env.snapshot returned when so many segments were committed
  PRIMARY KEY(run_id, group_id, sample, attempt, segments), FOREIGN KEY(run_id, group_id, sample, attempt) REFERENCES attempts);

-- ---------------------------------------------------------------- steps and the queue
CREATE TABLE steps(run_id text NOT NULL REFERENCES runs, step int NOT NULL CHECK (step >= 0),   -- one trainer call
  version_before policy_version NOT NULL, updated bool,                      -- version after = version_before + updated::int
  groups int CHECK (groups >= 0), cause text,                                -- queue rows of all shares; 0 = empty; cause: why empty or not updated
  state text NOT NULL CHECK (state IN ('planned','applied','durable')), planned_epoch bigint NOT NULL, applied_epoch bigint,
  plan_sha256 sha256, weights_sha256 sha256, metrics jsonb, replays int NOT NULL DEFAULT 0,
  planned_at timestamptz NOT NULL DEFAULT now(), applied_at timestamptz, PRIMARY KEY(run_id, step),
  CONSTRAINT applied_known CHECK ((state = 'planned') = (updated IS NULL) AND (state = 'planned' OR (weights_sha256 IS NOT NULL AND groups IS NOT NULL AND applied_at IS NOT NULL))),
  CONSTRAINT empty_makes_nothing CHECK (NOT (updated IS TRUE AND coalesce(groups, 0) = 0)), CONSTRAINT no_update_says_why CHECK (updated IS DISTINCT FROM false OR cause IS NOT NULL));
CREATE TABLE step_shares(run_id text NOT NULL, step int NOT NULL, share int NOT NULL, epoch bigint NOT NULL,
  state text NOT NULL CHECK (state IN ('planned','failed')), groups int NOT NULL DEFAULT 0 CHECK (groups >= 0), error text, waited_s double precision, record jsonb,
  PRIMARY KEY(run_id, step, share), FOREIGN KEY(run_id, step) REFERENCES steps, FOREIGN KEY(run_id, share) REFERENCES shares,
  CHECK ((state = 'failed') = (error IS NOT NULL)));
CREATE TABLE queue(run_id text NOT NULL, group_id bigint NOT NULL, part smallint NOT NULL CHECK (part IN (0, 1)), gen int NOT NULL,
  share int NOT NULL, admitted_seq bigint GENERATED ALWAYS AS IDENTITY,      -- completion order
  oldest_version policy_version NOT NULL, chain_lengths int[] NOT NULL, members int NOT NULL CHECK (members >= 1),
  state text NOT NULL DEFAULT 'admitted' CHECK (state IN ('admitted','planned','applied','trained','cut','expired')),   -- expired = withdrawn
  step int, pos int CHECK (pos >= 0), lag int CHECK (lag >= 0), cause text, closed_step int,
  admitted_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY(run_id, group_id, part, gen),
  FOREIGN KEY(run_id, group_id) REFERENCES groups, FOREIGN KEY(run_id, step) REFERENCES steps,
  CONSTRAINT bound CHECK ((state IN ('planned','applied','trained')) = (step IS NOT NULL) AND (step IS NULL) = (pos IS NULL) AND (step IS NULL) = (lag IS NULL)),
  CONSTRAINT left_says_why CHECK ((state IN ('cut','expired')) = (cause IS NOT NULL AND closed_step IS NOT NULL)));
CREATE UNIQUE INDEX queue_once ON queue(run_id, group_id, part) WHERE state <> 'expired';   -- a part is admitted, hence trained, at most once
CREATE UNIQUE INDEX queue_place ON queue(run_id, step, share, pos) WHERE step IS NOT NULL;
CREATE INDEX queue_open ON queue(run_id, share, admitted_seq) WHERE state IN ('admitted','planned','applied');

-- ---------------------------------------------------------------- outbox, events, the rest
CREATE TABLE outbox(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, run_id text NOT NULL REFERENCES runs,
  kind text NOT NULL CHECK (kind IN ('start_group','cancel_sample','deadline','close_group','publish')), key text NOT NULL, payload jsonb NOT NULL DEFAULT '{}',
  created_at timestamptz NOT NULL DEFAULT now(), done_at timestamptz, tries int NOT NULL DEFAULT 0, last_error text,
  due_at timestamptz NOT NULL DEFAULT now(), refusals int NOT NULL DEFAULT 0 CHECK (refusals >= 0), set_aside_at timestamptz, UNIQUE(run_id, kind, key),
  CONSTRAINT set_aside_says_why CHECK (set_aside_at IS NULL OR (refusals > 0 AND last_error IS NOT NULL)));
CREATE INDEX outbox_todo ON outbox(due_at, id) WHERE done_at IS NULL;        -- done rows may be deleted; start_group rows once their group has begun
CREATE INDEX outbox_workflow ON outbox(run_id, (coalesce(payload->>'workflow_id', key)), id) WHERE done_at IS NULL;   -- those of one workflow go in order
CREATE TABLE events(id bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT clock_timestamp(), run_id text NOT NULL, kind text NOT NULL,
  group_id bigint, sample int, attempt int, version int, step int, data jsonb NOT NULL DEFAULT '{}', PRIMARY KEY(id, at)) PARTITION BY RANGE(at);
CREATE TABLE events_default PARTITION OF events DEFAULT;                     -- the steward adds a partition a day
CREATE INDEX events_group ON events(run_id, group_id, at);
CREATE TABLE gateway_keys(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL, attempt int NOT NULL, key_sha256 sha256 NOT NULL UNIQUE,
  revoked_at timestamptz, fence bigint NOT NULL, refused text, failure text,   -- refused: the budget that refused the last request; failure: an infra_error
  PRIMARY KEY(run_id, group_id, sample, attempt), FOREIGN KEY(run_id, group_id, sample, attempt) REFERENCES attempts);
CREATE TABLE gateway_calls(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL, attempt int NOT NULL, seq int NOT NULL,
  call int NOT NULL CHECK (call >= 0), after int, asked jsonb, PRIMARY KEY(run_id, group_id, sample, attempt, seq),   -- which call a segment answers, which it goes on from
  FOREIGN KEY(run_id, group_id, sample, attempt) REFERENCES attempts, CONSTRAINT first_says_what CHECK ((seq = call) = (asked IS NOT NULL)), CONSTRAINT in_order CHECK (call <= seq AND after < call));
CREATE TABLE objects(sha256 sha256 PRIMARY KEY, s3_key text NOT NULL UNIQUE, bytes bigint NOT NULL CHECK (bytes > 0), media_type text NOT NULL, created_at timestamptz NOT NULL DEFAULT now());
CREATE TABLE evaluations(run_id text NOT NULL, name text NOT NULL, version policy_version NOT NULL, task_id text NOT NULL, sample int NOT NULL CHECK (sample >= 0),
  status rollout_status NOT NULL, reward double precision, at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY(run_id, name, version, task_id, sample), FOREIGN KEY(run_id, version) REFERENCES policy_versions);
CREATE TABLE evaluation_pins(run_id text NOT NULL, version policy_version NOT NULL, at timestamptz NOT NULL DEFAULT now(),   -- versions kept for a held-out evaluation, as long as no publication needs the slot
  PRIMARY KEY(run_id, version), FOREIGN KEY(run_id, version) REFERENCES policy_versions);

-- ---------------------------------------------------------------- guards
CREATE FUNCTION runs_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW.version < OLD.version OR NEW.next_step < OLD.next_step OR NEW.trainer_epoch < OLD.trainer_epoch OR NEW.durable_step < OLD.durable_step
     OR (OLD.durable_step IS NOT NULL AND NEW.durable_step IS NULL) OR (NEW.first_step, NEW.first_version, NEW.config_sha256) IS DISTINCT FROM (OLD.first_step, OLD.first_version, OLD.config_sha256)
  THEN RAISE EXCEPTION 'a run never goes back (%); fork it', OLD.run_id USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
CREATE TRIGGER runs_guard BEFORE UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION runs_guard();
CREATE FUNCTION groups_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE ok text[] := CASE OLD.state
  WHEN 'registered' THEN ARRAY['submitted','cancelled','quarantined'] WHEN 'quarantined' THEN ARRAY['registered']
  WHEN 'submitted' THEN ARRAY['complete','registered','cancelled','abandoned','expired']
  WHEN 'complete' THEN ARRAY['submitted','cancelled','expired'] ELSE ARRAY[]::text[] END;
BEGIN
  IF NEW.state <> OLD.state AND NOT NEW.state = ANY(ok) THEN
    RAISE EXCEPTION 'illegal group transition % -> % (%/%)', OLD.state, NEW.state, OLD.run_id, OLD.group_id USING ERRCODE = '23514'; END IF;
  IF NEW.gen < OLD.gen OR NEW.gen > OLD.gen + 1 OR (NEW.gen = OLD.gen AND (OLD.state, NEW.state) IN (('complete','submitted'), ('submitted','registered')))
  THEN RAISE EXCEPTION 'gen must grow by one when a group is opened again (%/%)', OLD.run_id, OLD.group_id USING ERRCODE = '23514'; END IF;
  IF NEW.gen > OLD.gen AND (NEW.begun_at, NEW.quorum_at, NEW.deadline_reached_at) IS DISTINCT FROM (NULL::timestamptz, NULL::timestamptz, NULL::timestamptz)
  THEN RAISE EXCEPTION 'a new gen starts without quorum (%/%)', OLD.run_id, OLD.group_id USING ERRCODE = '23514'; END IF;
  IF OLD.state = 'complete' AND NEW.state <> 'complete' AND EXISTS (SELECT 1 FROM ledger.queue q WHERE (q.run_id, q.group_id) = (OLD.run_id, OLD.group_id) AND q.state <> 'expired')
  THEN RAISE EXCEPTION 'withdraw the queue row first (%/%)', OLD.run_id, OLD.group_id USING ERRCODE = '23514'; END IF;
  NEW.updated_at := now(); RETURN NEW; END $$;
CREATE TRIGGER groups_guard BEFORE UPDATE ON groups FOR EACH ROW EXECUTE FUNCTION groups_guard();
CREATE FUNCTION attempts_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF OLD.status IS NOT NULL AND (NEW.status, NEW.state) IS DISTINCT FROM (OLD.status, OLD.state) THEN
    RAISE EXCEPTION 'an attempt ends once (%/% s%.a%)', OLD.run_id, OLD.group_id, OLD.sample, OLD.attempt USING ERRCODE = '23514'; END IF;
  IF NEW.fence < OLD.fence OR (OLD.state = 'running' AND NEW.state = 'submitted') OR NEW.submitted_version <> OLD.submitted_version
     OR (OLD.pinned_version IS NOT NULL AND NEW.pinned_version IS DISTINCT FROM OLD.pinned_version) THEN
    RAISE EXCEPTION 'fence, start and versions of an attempt are fixed (%/% s%.a%)', OLD.run_id, OLD.group_id, OLD.sample, OLD.attempt USING ERRCODE = '23514'; END IF;
  IF NEW.member AND NOT OLD.member AND NEW.cancel_cause IS NOT NULL AND NEW.cancel_cause <> 'deadline' THEN
    RAISE EXCEPTION 'a cancelled attempt cannot join (%/% s%.a%)', OLD.run_id, OLD.group_id, OLD.sample, OLD.attempt USING ERRCODE = '23514'; END IF;
  RETURN NEW; END $$;
CREATE TRIGGER attempts_guard BEFORE UPDATE ON attempts FOR EACH ROW EXECUTE FUNCTION attempts_guard();
CREATE FUNCTION queue_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE ok text[] := CASE OLD.state WHEN 'admitted' THEN ARRAY['planned','cut','expired'] WHEN 'planned' THEN ARRAY['applied']
  WHEN 'applied' THEN ARRAY['trained'] ELSE ARRAY[]::text[] END;
BEGIN
  IF NEW.state <> OLD.state AND NOT NEW.state = ANY(ok) THEN
    RAISE EXCEPTION 'illegal queue transition % -> % (%/%.%)', OLD.state, NEW.state, OLD.run_id, OLD.group_id, OLD.part USING ERRCODE = '23514'; END IF;
  IF OLD.step IS NOT NULL AND (NEW.step, NEW.pos, NEW.lag) IS DISTINCT FROM (OLD.step, OLD.pos, OLD.lag) THEN
    RAISE EXCEPTION 'a planned row is bound for ever (%/%.%)', OLD.run_id, OLD.group_id, OLD.part USING ERRCODE = '23514'; END IF;
  IF (NEW.oldest_version, NEW.chain_lengths, NEW.members, NEW.admitted_seq) IS DISTINCT FROM (OLD.oldest_version, OLD.chain_lengths, OLD.members, OLD.admitted_seq) THEN
    RAISE EXCEPTION 'a queue row is written once (%/%.%)', OLD.run_id, OLD.group_id, OLD.part USING ERRCODE = '23514'; END IF;
  RETURN NEW; END $$;
CREATE TRIGGER queue_guard BEFORE UPDATE ON queue FOR EACH ROW EXECUTE FUNCTION queue_guard();
CREATE FUNCTION steps_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF (OLD.state, NEW.state) NOT IN (('planned','planned'), ('planned','applied'), ('applied','applied'), ('applied','durable'), ('durable','durable'))
     OR (OLD.state <> 'planned' AND (NEW.updated, NEW.groups) IS DISTINCT FROM (OLD.updated, OLD.groups)) OR (OLD.state <> 'planned' AND NEW.weights_sha256 IS DISTINCT FROM OLD.weights_sha256
       AND NOT (NEW.state = 'applied' AND (SELECT r.exact = 'order' FROM runs r WHERE r.run_id = NEW.run_id)))   -- an inexact replay of what nobody has seen
  THEN RAISE EXCEPTION 'illegal step transition % -> % (%/%)', OLD.state, NEW.state, OLD.run_id, OLD.step USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
CREATE TRIGGER steps_guard BEFORE UPDATE ON steps FOR EACH ROW EXECUTE FUNCTION steps_guard();
CREATE FUNCTION born_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN   -- rows are born in their first state
  IF NEW.state <> TG_ARGV[0] THEN RAISE EXCEPTION '% starts as %, not %', TG_TABLE_NAME, TG_ARGV[0], NEW.state USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
CREATE TRIGGER runs_born BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION born_guard('creating');
CREATE TRIGGER groups_born BEFORE INSERT ON groups FOR EACH ROW EXECUTE FUNCTION born_guard('registered');
CREATE TRIGGER attempts_born BEFORE INSERT ON attempts FOR EACH ROW EXECUTE FUNCTION born_guard('submitted');
CREATE TRIGGER queue_born BEFORE INSERT ON queue FOR EACH ROW EXECUTE FUNCTION born_guard('admitted');
CREATE TRIGGER steps_born BEFORE INSERT ON steps FOR EACH ROW EXECUTE FUNCTION born_guard('planned');
CREATE FUNCTION versions_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE path text[] := ARRAY['computed','uploaded','loading','served','draining','retired','deleted'];
BEGIN
  IF array_position(path, NEW.state) < array_position(path, OLD.state) OR (OLD.state <> 'computed' AND (NEW.weights_sha256, NEW.weights_key) IS DISTINCT FROM (OLD.weights_sha256, OLD.weights_key)) THEN
    RAISE EXCEPTION 'a policy version never goes back and keeps its weights (%@%: % -> %)', OLD.run_id, OLD.version, OLD.state, NEW.state USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
CREATE TRIGGER versions_guard BEFORE UPDATE ON policy_versions FOR EACH ROW EXECUTE FUNCTION versions_guard();
CREATE FUNCTION segments_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  PERFORM 1 FROM ledger.attempts a WHERE (a.run_id, a.group_id, a.sample, a.attempt) = (NEW.run_id, NEW.group_id, NEW.sample, NEW.attempt) AND a.state = 'running' AND a.fence = NEW.fence;
  IF NOT FOUND THEN RAISE EXCEPTION 'segment for an attempt that is not running under this fence' USING ERRCODE = '23514'; END IF;
  IF (SELECT count(*) FROM ledger.policy_versions v WHERE v.run_id = NEW.run_id AND v.version IN (NEW.oldest_version, NEW.newest_version)) < 1 + (NEW.newest_version > NEW.oldest_version)::int THEN
    RAISE EXCEPTION 'segment of a version that is not registered' USING ERRCODE = '23514'; END IF;
  IF NEW.context_start > 0 AND NOT EXISTS (SELECT 1 FROM ledger.segments p WHERE (p.run_id, p.group_id, p.sample, p.attempt, p.chain) = (NEW.run_id, NEW.group_id, NEW.sample, NEW.attempt, NEW.chain)
     AND p.seq < NEW.seq AND p.context_start + p.prompt_tokens + p.tokens = NEW.context_start) THEN
    RAISE EXCEPTION 'segment does not extend its chain' USING ERRCODE = '23514'; END IF;
  RETURN NEW; END $$;
CREATE TRIGGER segments_guard BEFORE INSERT ON segments FOR EACH ROW EXECUTE FUNCTION segments_guard();
CREATE FUNCTION log_change() RETURNS trigger LANGUAGE plpgsql AS $$       -- every change of state writes its event
DECLARE n jsonb := to_jsonb(NEW); o text := CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD)->>'state' END;
BEGIN
  IF o IS DISTINCT FROM n->>'state' THEN
    INSERT INTO ledger.events(run_id, kind, group_id, sample, attempt, version, step, data) VALUES (NEW.run_id, TG_TABLE_NAME || '.' || (n->>'state'),
      (n->>'group_id')::bigint, (n->>'sample')::int, (n->>'attempt')::int, coalesce(n->>'version', n->>'oldest_version', n->>'pinned_version')::int, (n->>'step')::int,
      jsonb_strip_nulls(jsonb_build_object('from', o, 'gen', n->'gen', 'part', n->'part', 'cause', coalesce(n->'cause', n->'closed_cause', n->'resubmitted_as', n->'failure'), 'status', n->'status')));
  END IF; RETURN NULL; END $$;
CREATE TRIGGER runs_log AFTER INSERT OR UPDATE OF state ON runs FOR EACH ROW EXECUTE FUNCTION log_change();
CREATE TRIGGER groups_log AFTER INSERT OR UPDATE OF state ON groups FOR EACH ROW EXECUTE FUNCTION log_change();
CREATE TRIGGER attempts_log AFTER INSERT OR UPDATE OF state ON attempts FOR EACH ROW EXECUTE FUNCTION log_change();
CREATE TRIGGER queue_log AFTER INSERT OR UPDATE OF state ON queue FOR EACH ROW EXECUTE FUNCTION log_change();
CREATE TRIGGER steps_log AFTER INSERT OR UPDATE OF state ON steps FOR EACH ROW EXECUTE FUNCTION log_change();
CREATE TRIGGER versions_log AFTER INSERT OR UPDATE OF state ON policy_versions FOR EACH ROW EXECUTE FUNCTION log_change();

-- ---------------------------------------------------------------- views
CREATE VIEW served AS SELECT run_id, max(version) AS version FROM policy_versions WHERE state = 'served' GROUP BY 1;
CREATE VIEW stuck_rollouts AS SELECT a.run_id, a.group_id, a.sample, a.attempt, g.workflow_id, a.state, a.worker, a.engine_id, a.pinned_version, a.turns, a.policy_tokens,
    now() - coalesce(a.last_progress_at, a.submitted_at) AS silent_for, now() - a.submitted_at AS age,
    r.version - coalesce(a.oldest_version, a.pinned_version) AS lag, a.cancel_cause           -- a queued attempt has no lag
  FROM attempts a JOIN groups g USING (run_id, group_id) JOIN runs r USING (run_id)
  WHERE a.state IN ('submitted','running') AND coalesce(a.last_progress_at, a.submitted_at) < now() - r.stuck_after;
CREATE VIEW lag_histogram AS SELECT run_id, step, lag, count(*) AS groups FROM queue WHERE step IS NOT NULL GROUP BY 1, 2, 3;
CREATE VIEW resubmissions AS SELECT run_id, resubmitted_as AS cause, counts_as_failure, count(*) AS n, sum(policy_tokens) AS wasted_tokens
  FROM attempts WHERE resubmitted_as IS NOT NULL GROUP BY 1, 2, 3;
CREATE VIEW reward_by_version AS SELECT a.run_id, coalesce(a.oldest_version, a.pinned_version, a.submitted_version) AS version, count(*) AS n,
  avg(a.reward) AS mean, stddev_samp(a.reward) AS sd, avg((a.status = 'truncated')::int) AS truncated, g.environment FROM attempts a JOIN groups g USING (run_id, group_id) WHERE a.member GROUP BY 1, 2, 7;
CREATE VIEW reward_by_step AS SELECT q.run_id, q.step, g.environment, count(DISTINCT q.group_id) AS groups, count(*) AS n, avg(a.reward) AS mean, stddev_samp(a.reward) AS sd, sum(a.policy_tokens) AS policy_tokens
  FROM queue q JOIN groups g USING (run_id, group_id) JOIN attempts a ON (a.run_id, a.group_id, a.part) = (q.run_id, q.group_id, q.part) AND a.member WHERE q.step IS NOT NULL GROUP BY 1, 2, 3;
CREATE VIEW evaluation_by_version AS SELECT run_id, name, version, count(*) AS n, avg(reward) AS mean, stddev_samp(reward) AS sd, avg(coalesce(reward >= 1, false)::int) AS solved,
  avg((status = 'truncated')::int) AS truncated, min(at) AS at FROM evaluations GROUP BY 1, 2, 3;
CREATE VIEW token_rate AS SELECT run_id, date_trunc('minute', created_at) AS minute, sum(tokens)/60.0 AS policy_tok_s, sum(prompt_tokens)/60.0 AS prompt_tok_s FROM segments GROUP BY 1, 2;
CREATE VIEW version_pins AS SELECT v.run_id, v.version, v.state, count(a.run_id) + count(DISTINCT e.version) AS pins FROM policy_versions v LEFT JOIN attempts a ON a.run_id = v.run_id AND a.state = 'running'
  AND v.version IN (CASE WHEN a.sampling_version IS NULL THEN a.pinned_version END, a.sampling_version, a.kv_version) LEFT JOIN evaluation_pins e ON (e.run_id, e.version) = (v.run_id, v.version) GROUP BY 1, 2, 3;
CREATE VIEW group_timeline AS SELECT run_id, group_id, at, kind, sample, attempt, version, step, data FROM events WHERE group_id IS NOT NULL;
CREATE VIEW group_place AS SELECT g.run_id, g.share, g.group_id, g.batch, CASE WHEN g.state <> 'complete' THEN g.state WHEN q.open > 0 THEN 'queue'
    WHEN q.trained > 0 THEN 'trained' WHEN q.cut > 0 THEN 'cut' ELSE 'nowhere' END AS place
  FROM groups g LEFT JOIN (SELECT run_id, group_id, count(*) FILTER (WHERE state IN ('admitted','planned','applied')) AS open, count(*) FILTER (WHERE state = 'trained') AS trained,
    count(*) FILTER (WHERE state = 'cut') AS cut FROM queue GROUP BY 1, 2) q USING (run_id, group_id);
CREATE VIEW balance AS SELECT r.run_id, coalesce((SELECT sum(b.groups) FROM task_batches b WHERE b.run_id = r.run_id), 0) AS drawn, p.*,
    p.registered + p.submitted + p.queue AS owed FROM runs r, LATERAL (SELECT count(*) FILTER (WHERE place = 'registered') AS registered, count(*) FILTER (WHERE place = 'submitted') AS submitted,
    count(*) FILTER (WHERE place = 'queue') AS queue, count(*) FILTER (WHERE place = 'trained') AS trained, count(*) FILTER (WHERE place = 'cut') AS cut,
    count(*) FILTER (WHERE place = 'cancelled') AS cancelled, count(*) FILTER (WHERE place = 'abandoned') AS abandoned, count(*) FILTER (WHERE place = 'expired') AS expired,
    count(*) FILTER (WHERE place = 'quarantined') AS quarantined, count(*) FILTER (WHERE place = 'nowhere') AS nowhere FROM group_place g WHERE g.run_id = r.run_id) p;
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
CREATE VIEW outstanding AS                                                   -- what has a deadline: queue rows, and groups still sampled (a lower bound: kept members and live attempts)
  SELECT q.run_id, q.share, q.group_id, q.part, true AS ready, q.oldest_version AS version, q.admitted_seq FROM queue q WHERE q.state = 'admitted'
  UNION ALL SELECT g.run_id, g.share, g.group_id, 1, false, coalesce(m.v, g.submitted_version), NULL FROM groups g, LATERAL (SELECT min(coalesce(a.oldest_version, a.pinned_version, a.submitted_version)) AS v
    FROM attempts a WHERE (a.run_id, a.group_id) = (g.run_id, g.group_id) AND ((a.member AND a.part IS NULL) OR (a.state IN ('submitted','running') AND a.cancel_cause IS NULL))) m
    WHERE g.state = 'submitted';
CREATE VIEW waiting AS SELECT r.run_id, s.share, r.state, r.next_step, st.state AS step_state, r.version, v.version AS served, r.version - v.version >= r.sync_every AS publish_due,
    h.held_by AS publish_held_by, o.ready, o.running, (SELECT count(*) FROM groups g WHERE g.run_id = r.run_id AND g.share = s.share AND g.state = 'registered') AS registered,
    o.oldest AS oldest_outstanding, CASE WHEN r.stale_policy = 'wait' THEN k.slack END AS slack, k.binding_deadline
  FROM runs r JOIN shares s USING (run_id) LEFT JOIN served v USING (run_id) LEFT JOIN steps st ON st.run_id = r.run_id AND st.step = r.next_step
  LEFT JOIN LATERAL (SELECT p.held_by FROM policy_versions p WHERE p.run_id = r.run_id AND p.held_since IS NOT NULL ORDER BY p.version DESC LIMIT 1) h ON true,
  LATERAL (SELECT count(*) FILTER (WHERE x.ready) AS ready, count(*) FILTER (WHERE NOT x.ready) AS running, min(x.version) AS oldest FROM outstanding x WHERE (x.run_id, x.share) = (r.run_id, s.share)) o,
  LATERAL (SELECT min(z.slack) AS slack, (array_agg(z.d ORDER BY z.slack, z.d))[1] AS binding_deadline FROM (SELECT y.version + r.max_lag AS d,
      r.batch_size * greatest(0, y.version + r.max_lag - r.version) - count(*) OVER (ORDER BY y.version) AS slack
    FROM (SELECT x.*, row_number() OVER (ORDER BY NOT x.ready, x.version, x.admitted_seq) AS n FROM outstanding x WHERE (x.run_id, x.share) = (r.run_id, s.share)) y
    WHERE NOT (y.ready AND y.n <= r.batch_size)) z) k;
CREATE VIEW ledger_violations AS                                             -- always empty; looks at open rows and at the last hour, so it stays fast
  SELECT q.run_id, 'members' AS rule, q.group_id || '.' || q.part AS what FROM queue q JOIN runs r USING (run_id), LATERAL (SELECT count(*) AS n,
      min(coalesce(a.oldest_version, a.pinned_version, a.submitted_version)) AS v FROM attempts a WHERE (a.run_id, a.group_id) = (q.run_id, q.group_id) AND a.member AND a.part = q.part) m
    WHERE q.state IN ('admitted','planned','applied') AND (m.n <> q.members OR m.v IS DISTINCT FROM q.oldest_version OR (r.completion = 'wait' AND m.n <> r.group_size))
  UNION ALL SELECT q.run_id, 'over_lag', q.group_id || '.' || q.part FROM queue q JOIN runs r USING (run_id) WHERE q.state IN ('planned','applied') AND r.stale_policy IN ('resubmit','wait') AND q.lag > r.max_lag
  UNION ALL SELECT q.run_id, 'lag_wrong', q.group_id || '.' || q.part FROM queue q JOIN steps s USING (run_id, step) WHERE q.state IN ('planned','applied') AND q.lag <> s.version_before - q.oldest_version
  UNION ALL SELECT q.run_id, 'queue_of_open_group', q.group_id::text FROM queue q JOIN groups g USING (run_id, group_id) JOIN runs r USING (run_id)
    WHERE q.state IN ('admitted','planned','applied') AND g.state <> 'complete' AND NOT (r.on_stragglers = 'carry_over' AND r.completion = 'deadline' AND q.part = 0)
  UNION ALL SELECT q.run_id, 'step_behind_row', q.group_id::text FROM queue q JOIN steps s USING (run_id, step) WHERE q.state IN ('planned','applied') AND q.state <> s.state
  UNION ALL SELECT g.run_id, 'nowhere', g.group_id::text FROM groups g WHERE g.state = 'complete' AND g.updated_at > now() - interval '1 hour'
    AND NOT EXISTS (SELECT 1 FROM queue q WHERE (q.run_id, q.group_id) = (g.run_id, g.group_id) AND q.state <> 'expired')
  UNION ALL SELECT g.run_id, 'lost_group', g.group_id::text FROM groups g WHERE g.state = 'submitted' AND g.begun_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.run_id = g.run_id AND o.kind = 'start_group' AND o.key = g.workflow_id)
  UNION ALL SELECT a.run_id, 'live_in_closed_group', a.group_id || ' s' || a.sample || '.a' || a.attempt FROM attempts a JOIN groups g USING (run_id, group_id)
    WHERE a.state IN ('submitted','running') AND a.cancel_cause IS NULL AND g.state <> 'submitted'
  UNION ALL SELECT r.run_id, 'drawn', b.drawn::text FROM runs r JOIN LATERAL (SELECT coalesce(sum(t.groups), 0) AS drawn FROM task_batches t WHERE t.run_id = r.run_id) b ON true
    WHERE b.drawn <> (SELECT count(*) FROM groups g WHERE g.run_id = r.run_id)
  UNION ALL SELECT r.run_id, 'step_gap', s.n::text FROM runs r JOIN LATERAL (SELECT count(*) AS n, max(t.step) AS last, min(t.step) AS first, count(*) FILTER (WHERE t.state <> 'planned') AS applied,
      count(*) FILTER (WHERE t.updated) AS updated, count(*) FILTER (WHERE t.state = 'durable' AND t.step >= r.durable_step) AS early FROM steps t WHERE t.run_id = r.run_id) s ON s.n > 0
    WHERE s.first <> r.first_step OR s.last - s.first + 1 <> s.n OR s.applied <> r.next_step - r.first_step OR s.n - s.applied > 1 OR r.version - r.first_version <> s.updated OR s.early > 0
  UNION ALL SELECT r.run_id, 'durable_missing', r.durable_step::text FROM runs r WHERE r.durable_step IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM checkpoints c WHERE c.run_id = r.run_id AND c.step = r.durable_step AND c.state = 'durable')
  UNION ALL SELECT r.run_id, 'served_ahead', v.version::text FROM runs r JOIN served v USING (run_id) WHERE v.version > r.version;
