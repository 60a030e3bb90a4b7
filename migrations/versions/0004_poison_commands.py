"""Commands that are refused every time are set aside, and no longer hold up the others."""

from migrations import scripts

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
