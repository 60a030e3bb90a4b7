"""The local stack on the real binaries: restarts, joins, refusals, and no orphans."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from temporalio.client import Client

from domain.errors import ConfigError
from domain.services import Services
from rollbook.stack import background, external, ports
from rollbook.stack.child import State
from rollbook.stack.parts import USUAL, PortWishes
from rollbook.stack.seaweed import GRPC_OFFSET
from rollbook.stack.stack import Stack, down
from rollbook.stack.state import StateFolder
from rollbook.stack.supervise import LAUNCHER
from storage.objects import ObjectStore, digest

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("postgres", "temporal", "seaweed")


def eventually(true: Callable[[], bool], within_s: float) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + within_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def living_in(folder: Path) -> list[str]:
    """Command lines of all processes that name the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if str(folder) in line and process.status() != psutil.STATUS_ZOMBIE:
                found.append(line)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def sockets_of(folder: Path) -> list[str]:
    """What listens, or has listened, outside the folder."""
    used = json.loads((folder / "stack.json").read_text())["ports"]
    numbers = {f"-{port + offset}.sock" for port in used.values() for offset in (0, GRPC_OFFSET)}
    found = (path.name for path in Path("/tmp").glob("seaweedfs-*.sock"))
    return [name for name in found if any(name.endswith(number) for number in numbers)]


@pytest.fixture
def folder(state_folder: Path, request: pytest.FixtureRequest) -> Path:
    return state_folder / str(request.node.name)


def off_the_usual_ports(folder: Path) -> Path:
    """Let the stack believe that it used other ports before: the usual ones may be anybody's."""
    state = StateFolder(folder)
    chosen: dict[str, int] = {}
    for name in USUAL:
        chosen[name] = ports.choose(0, chosen.values(), companion=GRPC_OFFSET)
    state.remember_ports(state.record(), chosen)
    state.release()
    return folder


@pytest.fixture(scope="module")
def stack(state_folder: Path) -> Iterator[Stack]:
    with Stack.up(off_the_usual_ports(state_folder / "stack"), environ={}) as up:
        yield up


def pid_of(stack: Stack, name: str) -> int:
    assert stack.supervisor is not None
    [pid] = [r.pid for r in stack.supervisor.reports() if r.name == name]
    assert pid is not None
    return pid


def kill_and_await(stack: Stack, name: str) -> None:
    assert stack.supervisor is not None
    before = {r.name: r.restarts for r in stack.supervisor.reports()}
    os.kill(pid_of(stack, name), signal.SIGKILL)

    def returned() -> bool:
        assert stack.supervisor is not None
        [now] = [r for r in stack.supervisor.reports() if r.name == name]
        return now.restarts > before[name] and now.state is State.READY

    assert eventually(returned, 30)


def test_everything_answers_after_up(stack: Stack) -> None:
    external.check(stack.services)


def test_files_with_secrets_are_closed(stack: Stack) -> None:
    for name in ("stack.json", "services.json", "lock"):
        assert (stack.folder.path / name).stat().st_mode & 0o077 == 0
    for name in ("pg", "s3", "temporal", "logs"):
        assert (stack.folder.path / name).stat().st_mode & 0o077 == 0


def test_servers_listen_on_loopback_only(stack: Stack) -> None:
    for name in SERVERS:
        process = psutil.Process(pid_of(stack, name))
        listening = [
            c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}


def test_committed_rows_survive_kill_9_of_postgres(stack: Stack) -> None:
    acknowledged: list[int] = []
    with psycopg.connect(stack.services.database_url, autocommit=True) as tx:
        tx.execute("CREATE TABLE kept (n int)")

    def write() -> None:
        with psycopg.connect(stack.services.database_url, autocommit=True) as tx:
            for n in range(1_000_000):
                try:
                    tx.execute("INSERT INTO kept VALUES (%s)", [n])
                except psycopg.OperationalError:
                    return
                acknowledged.append(n)

    writer = threading.Thread(target=write)
    writer.start()
    assert eventually(lambda: len(acknowledged) > 50, 20)
    kill_and_await(stack, "postgres")
    writer.join(20)
    with psycopg.connect(stack.services.database_url) as tx:
        kept = {row[0] for row in tx.execute("SELECT n FROM kept")}
    assert set(acknowledged) <= kept


def test_acknowledged_objects_survive_kill_9_of_the_store(stack: Stack) -> None:
    # Each bucket has volumes of its own; those of the second are made after a crash.
    stores = [
        ObjectStore(stack.services.model_copy(update={"s3_bucket": f"kept-{n}"})) for n in range(2)
    ]
    kept: list[tuple[ObjectStore, str, bytes]] = []
    for store in stores:
        store.prepare()
        for n in range(20):
            kept.append((store, f"{n}", body := os.urandom(1000)))
            store.put_new(f"{n}", body, sha256=digest(body))
        os.kill(pid_of(stack, "seaweed"), signal.SIGKILL)
        # No waiting: the client's own tries outlast the restart.
        for held, key, body in kept:
            assert held.get(key, sha256=digest(body)) == body


async def test_started_workflows_survive_kill_9_of_temporal(stack: Stack) -> None:
    address, namespace = stack.services.temporal_address, stack.services.temporal_namespace
    client = await Client.connect(address, namespace=namespace)
    for n in range(20):
        await client.start_workflow("Nobody", id=f"kept-{n}", task_queue="none")
    await asyncio.to_thread(kill_and_await, stack, "temporal")
    for n in range(20):
        told = await client.get_workflow_handle(f"kept-{n}").describe()
        assert told.task_queue == "none"


async def test_closed_workflows_stay_visible_for_30_days(stack: Stack) -> None:
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    client = await Client.connect(stack.services.temporal_address)
    told = await client.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=stack.services.temporal_namespace)
    )
    assert told.config.workflow_execution_retention_ttl.seconds == 30 * 24 * 3600


def test_a_second_up_joins(stack: Stack) -> None:
    with Stack.up(stack.folder.path, environ={}) as second:
        assert second.joined is not None
        assert second.joined.pid == os.getpid()
        assert second.services == stack.services
    external.check(stack.services)


def test_a_second_up_with_other_wishes_is_refused(stack: Stack) -> None:
    with pytest.raises(ConfigError, match=r"--s3-port = 1, .* leave the option out"):
        Stack.up(stack.folder.path, environ={}, wishes=PortWishes(s3=1))
    environ = {"ROLLBOOK_DATABASE_URL": stack.services.database_url}
    with pytest.raises(ConfigError, match="choose another --state"):
        Stack.up(stack.folder.path, environ=environ)


def test_external_addresses_take_the_place_of_embedded_ones(
    services: Services, folder: Path
) -> None:
    with Stack.up(folder, environ=services.environment()) as stack:
        assert stack.embedded == ()
        assert stack.services == services
    environ = services.environment()
    del environ["ROLLBOOK_S3_ENDPOINT"]
    with Stack.up(folder, environ=environ) as stack:
        assert stack.embedded == ("s3",)
        assert stack.services.database_url == services.database_url
        assert stack.services.s3_access_key != services.s3_access_key
        external.check(stack.services)


def test_external_services_are_checked_before_anything_starts(
    services: Services, folder: Path
) -> None:
    wrong = {
        "database_url": services.database_url.replace("rollbook:", "rollbook:wrong"),
        "temporal_address": f"127.0.0.1:{ports.free_port()}",
        "s3_secret_key": "wrong",
    }
    environ = services.model_copy(update=wrong).environment()
    with pytest.raises(ConfigError) as refused:
        Stack.up(folder, environ=environ)
    for variable in ("ROLLBOOK_DATABASE_URL", "ROLLBOOK_TEMPORAL_ADDRESS", "AWS_SECRET_ACCESS_KEY"):
        assert variable in str(refused.value)
    assert "wrong" not in str(refused.value)
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        Stack.up(folder, environ={"ROLLBOOK_S3_ENDPOINT": services.s3_endpoint})
    assert not folder.exists()


def test_a_taken_port_is_refused_if_asked_for_and_avoided_if_not(
    services: Services, folder: Path
) -> None:
    taken = int(services.temporal_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"--temporal-port = {taken} is taken"):
        Stack.up(folder, environ={}, wishes=PortWishes(temporal=taken))
    assert ports.choose(taken) != taken


def background_pid(folder: Path) -> int:
    return int((folder / "lock").read_text().split()[0])


def test_a_stack_in_the_background_is_joined_and_stopped_by_others(folder: Path) -> None:
    off_the_usual_ports(folder)
    others = set(sockets_of(folder))  # whoever had these ports before
    first = background.start(folder, environ=dict(os.environ))
    second = background.start(folder, environ=dict(os.environ))
    assert first.services == second.services
    external.check(first.services)
    assert set(sockets_of(folder)) - others != set()
    assert down(folder) is True
    assert living_in(folder) == []
    assert set(sockets_of(folder)) <= others
    assert down(folder) is False


def test_nothing_is_left_when_the_supervisor_is_killed(folder: Path) -> None:
    off_the_usual_ports(folder)
    started = background.start(folder, environ=dict(os.environ))
    with psycopg.connect(started.services.database_url, autocommit=True) as tx:
        tx.execute("CREATE TABLE kept AS SELECT 1 AS n")
    os.kill(background_pid(folder), signal.SIGKILL)
    assert eventually(lambda: living_in(folder) == [], 5), living_in(folder)
    assert len([*(folder / "pids").glob("*.pid")]) == 3  # stale

    again = background.start(folder, environ=dict(os.environ))
    try:
        assert again.services == started.services  # the same ports and secrets
        with psycopg.connect(again.services.database_url) as tx:
            assert tx.execute("SELECT n FROM kept").fetchone() == (1,)
    finally:
        assert down(folder) is True


def test_a_background_start_that_fails_says_why(folder: Path, services: Services) -> None:
    taken = int(services.temporal_address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"--temporal-port = {taken} is taken"):
        background.start(folder, environ=dict(os.environ), wishes=PortWishes(temporal=taken))


def test_a_cluster_of_another_major_version_is_refused(folder: Path) -> None:
    with Stack.up(folder, environ={}):
        pass
    (folder / "pg" / "PG_VERSION").write_text("17\n")
    with pytest.raises(ConfigError, match=r"PostgreSQL 17, the installed wheel is 18"):
        Stack.up(folder, environ={})
    assert living_in(folder) == []


def test_lost_secrets_are_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "s3").mkdir()
    with pytest.raises(ConfigError, match=r"stack.json is missing"):
        Stack.up(folder, environ={})


@pytest.mark.skipif(os.geteuid() != 0, reason="shows what root does")
def test_root_runs_postgres_as_nobody_below_a_closed_folder_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with Stack.up(tmp_path / "state", environ={}) as stack:
        external.check(stack.services)
        assert (tmp_path / "state" / "pg").stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="root plays a normal user in a user namespace")
def test_a_normal_user_runs_it_all(folder: Path) -> None:
    code = (
        "import os; from pathlib import Path; from rollbook.stack import external; "
        "from rollbook.stack.stack import Stack\n"
        "assert os.geteuid() != 0\n"
        f"with Stack.up(Path({str(folder)!r}), environ={{}}) as stack: external.check(stack.services)"
    )
    launch = (sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), "9", "mapped")
    done = subprocess.run(
        [*launch, sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "HOME": "/"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert living_in(folder) == []
