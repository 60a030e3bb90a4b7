"""A segment holds its own arrays: the columns for arrays in the object store go."""

from migrations import scripts

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
