"""Sessions of the recording gateway."""

from migrations import scripts

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
