-- Where the images of a segment's prompt stand in it, so that they can be asked for again, and trained on.
SET LOCAL search_path = ledger;
ALTER TABLE segments ADD COLUMN image_places int[] NOT NULL DEFAULT '{}',
  ADD CONSTRAINT images_placed CHECK (cardinality(image_places) = 2*cardinality(images));
