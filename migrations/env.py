"""Runs the migrations inside the connection that `storage.database.upgrade` hands over.

The revision stands in `public.rollbook_revision`, outside the schema it describes, so that the
schema itself can be compared with `storage/schema.sql` byte for byte.
"""

from alembic import context

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("run `rollbook db upgrade`: migrations take their connection from there")

context.configure(
    connection=connection,
    version_table="rollbook_revision",
    version_table_schema="public",
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
