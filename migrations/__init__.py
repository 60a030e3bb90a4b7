"""Alembic migrations of the ledger; `storage.database.upgrade` and `rollbook db upgrade` run them."""
