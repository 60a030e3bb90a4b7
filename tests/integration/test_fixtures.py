"""The session's services answer."""

import psycopg

from domain.services import Services
from rollbook.stack.child import State
from rollbook.stack.supervise import Supervisor


def test_postgres_answers(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as tx:
        assert tx.execute("SELECT 1").fetchone() == (1,)


def test_all_services_are_ready(services: Services, supervisor: Supervisor) -> None:
    assert {report.name for report in supervisor.reports()} == {"postgres", "temporal", "seaweed"}
    assert all(report.state is State.READY for report in supervisor.reports())
