-- Under exact = 'order' a step that is replayed before it is durable takes the digest of what it makes now.
SET LOCAL search_path = ledger;
CREATE OR REPLACE FUNCTION steps_guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF (OLD.state, NEW.state) NOT IN (('planned','planned'), ('planned','applied'), ('applied','applied'), ('applied','durable'), ('durable','durable'))
     OR (OLD.state <> 'planned' AND (NEW.updated, NEW.groups) IS DISTINCT FROM (OLD.updated, OLD.groups)) OR (OLD.state <> 'planned' AND NEW.weights_sha256 IS DISTINCT FROM OLD.weights_sha256
       AND NOT (NEW.state = 'applied' AND (SELECT r.exact = 'order' FROM runs r WHERE r.run_id = NEW.run_id)))   -- an inexact replay of what nobody has seen
  THEN RAISE EXCEPTION 'illegal step transition % -> % (%/%)', OLD.state, NEW.state, OLD.run_id, OLD.step USING ERRCODE = '23514'; END IF; RETURN NEW; END $$;
