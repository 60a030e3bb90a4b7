"""A segment holds its own arrays: the columns for arrays in the object store go."""

from pathlib import Path

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    # The driver's own cursor: SQLAlchemy would read the colons and percent signs as parameters.
    driver = op.get_bind().connection.driver_connection
    driver.execute("SET LOCAL lock_timeout = '2s'")
    driver.execute(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
    driver.execute("SET LOCAL search_path = public")


def downgrade() -> None:
    raise NotImplementedError("the ledger is the truth about a run; restore a backup instead")
