"""Real services for the tests: started lazily, once a session, from the project's own stack.

`postgres_url`, `temporal_address` and `s3_services` start one service each; `services` is all three
together. They live in a temporary folder, on free ports, and die with pytest, even by kill -9.
"""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.services import Services
from rollbook.stack import ports
from rollbook.stack.postgres import Postgres
from rollbook.stack.seaweed import GRPC_OFFSET, Seaweed, SeaweedPorts, sockets_suit
from rollbook.stack.supervise import Supervisor
from rollbook.stack.temporal import Temporal

pytest_plugins = ["tests.ledger_fixtures", "tests.short_run", "tests.stuck_run"]


@pytest.fixture(scope="session")
def state_folder() -> Iterator[Path]:
    """A folder that `nobody` can pass through (pytest's own temporary folders are closed)."""
    folder = Path(tempfile.mkdtemp(prefix="rollbook-tests-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def supervisor(state_folder: Path) -> Iterator[Supervisor]:
    with Supervisor(state_folder / "pids") as running:
        yield running


@pytest.fixture(scope="session")
def postgres(state_folder: Path, supervisor: Supervisor) -> Postgres:
    server = Postgres(
        state=state_folder,
        port=ports.free_port(),
        password=secrets.token_hex(16),
        # The tests kill processes, not the machine: what the kernel holds survives.
        settings={"fsync": "off"},
    )
    server.prepare()
    supervisor.start(server.command())
    supervisor.wait_ready("postgres")
    return server


@pytest.fixture(scope="session")
def postgres_url(postgres: Postgres) -> str:
    """Superuser's URL of the database `postgres`; make databases of your own beside it."""
    return postgres.url("postgres")


@pytest.fixture(scope="session")
def temporal(state_folder: Path, supervisor: Supervisor) -> Temporal:
    port = ports.free_port()
    server = Temporal(state=state_folder, port=port, ui_port=ports.choose(0, [port]))
    server.prepare()
    supervisor.start(server.command())
    supervisor.wait_ready("temporal")
    return server


@pytest.fixture(scope="session")
def temporal_address(temporal: Temporal) -> str:
    """host:port of a running server with the namespace `rollbook`."""
    return temporal.address


@pytest.fixture(scope="session")
def seaweed(state_folder: Path, supervisor: Supervisor) -> Seaweed:
    chosen: list[int] = []
    for _ in range(5):
        chosen.append(ports.choose(0, chosen, companion=GRPC_OFFSET, suits=sockets_suit))
    server = Seaweed(
        state=state_folder,
        ports=SeaweedPorts(
            s3=chosen[0], master=chosen[1], volume=chosen[2], filer=chosen[3], admin=chosen[4]
        ),
        access_key=secrets.token_hex(10),
        secret_key=secrets.token_hex(20),
    )
    server.prepare()
    supervisor.start(server.command())
    supervisor.wait_ready("seaweed")
    return server


@pytest.fixture(scope="session")
def s3_services(seaweed: Seaweed) -> Services:
    """Services whose S3 part runs; the other addresses lead nowhere."""
    return Services(
        database_url="postgresql://nobody@127.0.0.1:1/none",
        temporal_address="127.0.0.1:1",
        s3_endpoint=seaweed.endpoint,
        s3_bucket=seaweed.bucket,
        s3_access_key=seaweed.access_key,
        s3_secret_key=seaweed.secret_key,
    )


@pytest.fixture(scope="session")
def services(postgres: Postgres, temporal: Temporal, s3_services: Services) -> Services:
    """All three running; the database is `rollbook`, empty."""
    return s3_services.model_copy(
        update={
            "database_url": postgres.url(),
            "temporal_address": temporal.address,
            "temporal_namespace": temporal.namespace,
            "temporal_ui": temporal.ui,
        }
    )
