-- A command that is refused by itself waits longer each time, then is set aside; the others overtake it.
SET LOCAL search_path = ledger;
ALTER TABLE outbox ADD COLUMN due_at timestamptz NOT NULL DEFAULT now(), ADD COLUMN refusals int NOT NULL DEFAULT 0 CHECK (refusals >= 0), ADD COLUMN set_aside_at timestamptz,
  ADD CONSTRAINT set_aside_says_why CHECK (set_aside_at IS NULL OR (refusals > 0 AND last_error IS NOT NULL));
DROP INDEX outbox_todo;
CREATE INDEX outbox_todo ON outbox(due_at, id) WHERE done_at IS NULL;
CREATE INDEX outbox_workflow ON outbox(run_id, (coalesce(payload->>'workflow_id', key)), id) WHERE done_at IS NULL;
