"""Mixes of environments, and versions kept for an evaluation."""

from migrations import scripts

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
