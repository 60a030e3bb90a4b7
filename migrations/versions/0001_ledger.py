"""The ledger.

Later revisions never edit this one: add `NNNN_name.py` here, change `storage/schema.sql` and
`storage/tables.py` alike, and `tests/integration/test_schema.py` compares all three.
"""

from migrations import scripts

revision = "0001"
down_revision = None


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
