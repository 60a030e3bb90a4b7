"""Views for people: failures and balance by task, wasted tokens, trained rollouts, where time goes."""

from migrations import scripts

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    scripts.run(__file__)


downgrade = scripts.refuse
