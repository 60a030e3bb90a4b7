"""Which execution of its activity an attempt belongs to."""

from migrations import scripts

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
