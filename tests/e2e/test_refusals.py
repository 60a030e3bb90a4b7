"""Bad input: exit code 2 and one message that names the thing and the remedy; nothing is made."""

import socket
from collections.abc import Callable

import psycopg
import pytest

from domain.services import Services
from storage.database import upgrade
from tests.command_line import Rollbook


def edit(old: str, new: str) -> Callable[[Rollbook], None]:
    """A change of the configuration file."""

    def apply(rollbook: Rollbook) -> None:
        path = rollbook.folder / "small.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return apply


def write(name: str, text: str) -> Callable[[Rollbook], None]:
    """A data set of its own."""

    def apply(rollbook: Rollbook) -> None:
        (rollbook.folder / name).write_text(text)
        edit('"reverse3:train"', f'"{name}"')(rollbook)

    return apply


def model_without_tokenizer(rollbook: Rollbook) -> None:
    """A folder with a config.json alone."""
    (rollbook.folder / "model").mkdir()
    (rollbook.folder / "model" / "config.json").write_text("{}")
    text = (rollbook.folder / "small.toml").read_text()
    head, _, rest = text.partition("[model.tiny]")
    _, _, tail = rest.partition("[trainer]")
    (rollbook.folder / "small.toml").write_text(head + '[model]\npath = "model"\n[trainer]' + tail)


BROKEN = 'def __getattr__(name):\n    raise RuntimeError("boom")\nimport nonsense_package\n'


def broken_module(rollbook: Rollbook) -> None:
    """A source module that cannot be imported."""
    (rollbook.folder / "reverse3.py").write_text(BROKEN)


CASES: dict[str, tuple[Callable[[Rollbook], None], list[str]]] = {
    "unknown key": (edit("ahead = 1", "ahed = 1"), ["'schedule.ahed'", "did you mean 'ahead'"]),
    "wrong type": (edit("lr = 1e-3", 'lr = "fast"'), ["trainer.lr", "'fast'"]),
    "impossible combination": (
        edit("max_lag = 1", "max_lag = 0"),
        ["max_lag = 0", "raise max_lag or lower ahead"],
    ),
    "no TOML": (edit("seed = 0", "seed = "), ["small.toml is not valid TOML", "line 3"]),
    "missing data set": (
        edit('"reverse3:train"', '"tasks.jsonl"'),
        ["tasks.dataset", "tasks.jsonl", "No such file"],
    ),
    "unreadable row": (
        write("tasks.jsonl", '{"id": "1", "data": {}}\n{"id": "2"\n'),
        ["tasks.jsonl, line 2", "not JSON"],
    ),
    "model folder without tokenizer": (model_without_tokenizer, ["model.path", "tokenizer.json"]),
    "source that does not import": (broken_module, ["tasks.source", "nonsense_package"]),
    "unknown source": (edit("reverse3:source", "reverse3:sauce"), ["tasks.source", "'sauce'"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_is_refused_before_anything_starts(case: str, rollbook: Rollbook) -> None:
    change, named = CASES[case]
    path = rollbook.configure()
    change(rollbook)
    refused(rollbook, "run", str(path), named=named)


def test_a_missing_file_is_refused(rollbook: Rollbook) -> None:
    refused(rollbook, "run", "nowhere.toml", named=["nowhere.toml", "No such file"])


def test_an_unknown_option_is_refused(rollbook: Rollbook) -> None:
    told = rollbook("run", "small.toml", "--wach", code=2)
    assert "--wach" in told
    assert not rollbook.state.exists()


def test_a_port_that_is_taken_is_refused(rollbook: Rollbook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = ("up", "--s3-port", str(port))
        refused(rollbook, *asked, named=[f"--s3-port = {port} is taken", "choose another port"])


def test_reading_where_no_stack_ever_was_is_refused(rollbook: Rollbook) -> None:
    refused(rollbook, "status", named=["no local stack", "--state"])


@pytest.fixture
def beside_services(rollbook: Rollbook, services: Services, postgres_url: str) -> Rollbook:
    """With services of somebody else in the environment; the ledger is a new database."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS refusals WITH (FORCE)")
        admin.execute("CREATE DATABASE refusals")
    url = postgres_url.rpartition("/")[0] + "/refusals"
    external = services.model_copy(update={"database_url": url})
    rollbook.environ |= external.environment()
    rollbook.configure()
    return rollbook


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ROLLBOOK_DATABASE_URL", None, ["ROLLBOOK_DATABASE_URL", "password"]),
        ("AWS_SECRET_ACCESS_KEY", "wrong", ["AWS_SECRET_ACCESS_KEY"]),
        ("ROLLBOOK_TEMPORAL_ADDRESS", "127.0.0.1:1", ["ROLLBOOK_TEMPORAL_ADDRESS", "127.0.0.1:1"]),
    ],
)
def test_wrong_credentials_and_addresses_are_refused(
    beside_services: Rollbook, variable: str, value: str | None, named: list[str]
) -> None:
    url = beside_services.environ["ROLLBOOK_DATABASE_URL"]
    upgrade(url)
    before, _, address = url.rpartition("@")
    wrong = f"{before.rpartition(':')[0]}:wrong@{address}"
    beside_services.environ[variable] = value or wrong
    refused(beside_services, "run", "small.toml", named=named)
    with psycopg.connect(url) as tx:
        assert tx.execute("SELECT count(*) FROM ledger.runs").fetchone() == (0,)


def test_a_ledger_that_is_missing_or_newer_is_refused(beside_services: Rollbook) -> None:
    url = beside_services.environ["ROLLBOOK_DATABASE_URL"]
    refused(beside_services, "run", "small.toml", named=["no ledger", "rollbook db upgrade"])
    upgrade(url)
    with psycopg.connect(url) as tx:
        tx.execute("UPDATE public.rollbook_revision SET version_num = '9999'")
    for command in (("run", "small.toml"), ("status",), ("db", "upgrade")):
        refused(beside_services, *command, named=["9999", "update rollbook"])


def refused(rollbook: Rollbook, *command: str, named: list[str]) -> None:
    """Exit code 2, one message, no traceback, no folder."""
    told = rollbook(*command, code=2)
    assert told.startswith("rollbook: ")
    assert told.count("rollbook: ") == 1
    assert "Traceback" not in told
    assert [part for part in named if part not in told] == []
    assert not rollbook.state.exists()
