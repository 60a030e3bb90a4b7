"""The network between a process and a service is cut, both ways or one way, longer than a heartbeat.

Where there can be a second worker there is one, on the right side of the cut: it takes over what the
first goes on working at, so that fences alone decide whose work counts.
"""

from urllib.parse import urlsplit

import pytest
from psycopg import conninfo

from domain.services import Services
from tests.chaos.stage import PROCESSES, Stage
from tests.outage import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LINES = {
    "trainer to Postgres": (("trainer",), "postgres"),
    "rollout worker to Postgres": (("rollouts",), "postgres"),
    "rollout worker to Temporal": (("rollouts",), "temporal"),
    "workflow worker to Postgres": (("workflows",), "postgres"),
    "workflow worker to Temporal": (("workflows",), "temporal"),
    "ledger worker to Postgres": (("ledger",), "postgres"),
    "ledger worker to Temporal": (("ledger",), "temporal"),
    # An engine is known by its address, so all of its callers take the same way.
    "rollout worker to engine": (("rollouts", "ledger"), "engine"),
    "engine to store": (("engine",), "store"),
    "trainer to store": (("trainer",), "store"),
}
HALVES = ("requests", "answers")


def address(services: Services, service: str) -> tuple[str, int]:
    if service == "postgres":
        parts = conninfo.conninfo_to_dict(services.database_url)
        return str(parts["host"]), int(str(parts["port"]))
    place = {
        "temporal": f"tcp://{services.temporal_address}",
        "store": services.s3_endpoint,
        "engine": services.engines[0],
    }[service]
    url = urlsplit(place)
    return str(url.hostname), int(url.port or 80)


def through(services: Services, service: str, port: int) -> Services:
    """The same services, one of them behind a proxy."""
    match service:
        case "postgres":
            url = conninfo.conninfo_to_dict(services.database_url)
            changed = {
                "database_url": f"postgresql://{url['user']}:{url['password']}"
                f"@127.0.0.1:{port}/{url['dbname']}"
            }
            return services.model_copy(update=changed)
        case "temporal":
            return services.model_copy(update={"temporal_address": f"127.0.0.1:{port}"})
        case "store":
            return services.model_copy(update={"s3_endpoint": f"http://127.0.0.1:{port}"})
        case _:
            return services.model_copy(update={"engines": (f"http://127.0.0.1:{port}",)})


@pytest.mark.parametrize("fault", ["cut", *HALVES])
@pytest.mark.parametrize("line", LINES)
def test_a_line_is_cut_for_a_while(stage: Stage, line: str, fault: str) -> None:
    processes, service = LINES[line]
    with Proxy(*address(stage.services, service)) as proxy:
        stage.places |= dict.fromkeys(processes, through(stage.services, service, proxy.port))
        stage.pause(0.3)
        stage.start(*PROCESSES)
        for name in processes:
            if name in ("rollouts", "workflows", "ledger") and service != "engine":
                stage.start(f"{name}-2")
        stage.until_step(1)
        stage.until_rollouts_run()
        if fault == "cut":
            proxy.cut()
        else:
            proxy.hold(answers=fault == "answers")
        stage.rest(6)
        proxy.mend()
        stage.pause(0.02)
        stage.finish()
        stage.check()
