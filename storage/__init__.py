"""The ledger (Postgres) and the object store (S3)."""
