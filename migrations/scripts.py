"""What each revision does: run the SQL file beside it, and never go back."""

from pathlib import Path

from alembic import op

from domain.errors import LedgerError


def run(revision: str) -> None:
    """Run the SQL beside the module of a revision, in the transaction of that revision.

    Args:
        revision: the module's `__file__`.
    """
    # The driver's own cursor: SQLAlchemy would read the colons and percent signs as parameters.
    driver = op.get_bind().connection.driver_connection
    assert driver is not None
    driver.execute("SET LOCAL lock_timeout = '2s'")
    driver.execute(Path(revision).with_suffix(".sql").read_text(encoding="utf-8"))
    driver.execute("SET LOCAL search_path = public")


def refuse() -> None:
    """There is no way back.

    Raises:
        LedgerError: always.
    """
    raise LedgerError("the ledger is the truth about a run; restore a backup instead")
