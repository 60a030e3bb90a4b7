-- A segment holds its own arrays (docs/adr/inline-segments.md): the columns for arrays in the object store were never written.
SET LOCAL search_path = ledger;
ALTER TABLE segments DROP CONSTRAINT inline_or_object, DROP COLUMN payload_key, DROP COLUMN payload_offset,
  ALTER prompt_delta SET NOT NULL, ALTER sampled_ids SET NOT NULL, ALTER logprobs SET NOT NULL;
