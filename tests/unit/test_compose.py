"""docker-compose.yml starts the commands the CLI has, with the variables the code reads."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from domain.services import VARIABLES
from rollbook.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: s for name, s in SERVICES.items() if s.get("image") == "rollbook:local"}
FILLED = {"ROLLBOOK_CONFIG": "runs/run.toml", "ROLLBOOK_RUN": "r", "ROLLBOOK_ENVIRONMENT": "e"}


def filled(word: str) -> str:
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: FILLED[found[1]], word)


def test_the_run_consists_of_these_processes() -> None:
    workers = {"worker-workflows", "worker-ledger", "worker-rollouts"}
    assert set(OURS) == {"migrate", "create", "engine", "gateway", "trainer"} | workers


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_the_cli_accepts(name: str) -> None:
    words = [filled(word) for word in OURS[name]["command"]]
    command: Any = typer.main.get_command(app)
    context: Any = None
    while hasattr(command, "get_command"):
        context = command.context_class(command, parent=context)
        command = command.get_command(context, words.pop(0))
        assert command is not None, OURS[name]["command"]
    made = command.make_context(name, words, parent=context)
    assert made.command.name in OURS[name]["command"]


@pytest.mark.parametrize("name", OURS)
def test_each_process_gets_the_variables_that_services_need(name: str) -> None:
    given = set(OURS[name]["environment"])
    assert given <= set(VARIABLES.values())
    assert given >= set(VARIABLES.values()) - {"ROLLBOOK_TEMPORAL_UI", "ROLLBOOK_ENGINES_RUN"}


def test_ports_are_bound_to_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_have_no_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for secret in ("PG_PASSWORD", "S3_KEY", "S3_SECRET"):
        uses = re.findall(rf"\$\{{{secret}([^}}]*)\}}", text)
        assert uses
        assert all(use.startswith(":?") for use in uses), secret
        assert f"{secret}=\n" in (ROOT / ".env.example").read_text()


def test_images_are_pinned() -> None:
    for name, service in SERVICES.items():
        image = service["image"]
        assert ":" in image, name
        assert not image.endswith(":latest"), name


@pytest.mark.parametrize(
    "name", [n for n in OURS if n.startswith(("worker", "trainer", "engine", "gateway"))]
)
def test_processes_get_time_to_stop(name: str) -> None:
    assert int(OURS[name]["stop_grace_period"].rstrip("s")) >= 60
