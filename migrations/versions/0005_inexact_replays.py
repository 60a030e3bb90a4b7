"""The digest of a step that is replayed inexactly."""

from migrations import scripts

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
