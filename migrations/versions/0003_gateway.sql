-- The gateway's sessions: the fence a key was issued for, what the gateway tells the attempt, and which call each segment answers.
SET LOCAL search_path = ledger;
ALTER TABLE gateway_keys ADD COLUMN fence bigint NOT NULL, ADD COLUMN refused text, ADD COLUMN failure text;
CREATE TABLE gateway_calls(run_id text NOT NULL, group_id bigint NOT NULL, sample int NOT NULL, attempt int NOT NULL, seq int NOT NULL,
  call int NOT NULL CHECK (call >= 0), after int, asked jsonb, PRIMARY KEY(run_id, group_id, sample, attempt, seq),
  FOREIGN KEY(run_id, group_id, sample, attempt) REFERENCES attempts, CONSTRAINT first_says_what CHECK ((seq = call) = (asked IS NOT NULL)), CONSTRAINT in_order CHECK (call <= seq AND after < call));
