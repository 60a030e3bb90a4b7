"""Where images stand in the prompts of segments."""

from migrations import scripts

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
