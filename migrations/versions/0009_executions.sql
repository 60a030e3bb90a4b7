-- When Temporal scheduled the execution that an attempt belongs to. One that was given up long ago, and
-- reaches the ledger only now, must not take the attempt back.
SET LOCAL search_path = ledger;
ALTER TABLE attempts ADD COLUMN scheduled_at timestamptz;
