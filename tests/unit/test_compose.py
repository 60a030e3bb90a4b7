"""docker-compose.yml starts the commands the CLI has, with the variables the code reads."""

import re
import tomllib
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
OURS = {name: s for name, s in SERVICES.items() if s.get("image", "").startswith("rollbook")}
FILLED = {"ROLLBOOK_CONFIG": "runs/run.toml", "ROLLBOOK_RUN": "r", "ROLLBOOK_ENVIRONMENT": "e"}
SECRETS = ("PG_PASSWORD", "S3_KEY", "S3_SECRET", "READER_PASSWORD", "GRAFANA_PASSWORD")
ONCE = {"migrate", "create", "reader", "temporal-schema", "temporal-init"}
ELSEWHERE = {
    "ROLLBOOK_TEMPORAL_UI",
    "ROLLBOOK_ENGINES_RUN",
    *(
        v
        for v in VARIABLES.values()
        if v.startswith(("ROLLBOOK_TEMPORAL_TLS", "ROLLBOOK_TEMPORAL_API"))
    ),
    "AWS_SESSION_TOKEN",
}
"""What a stack of its own has no use for."""


def filled(word: str) -> str:
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: FILLED[found[1]], word)


def test_the_run_consists_of_these_processes() -> None:
    workers = {"worker-workflows", "worker-ledger", "worker-rollouts"}
    always = {"migrate", "create", "gateway"} | workers
    profiles: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", [""]):
            profiles.setdefault(profile, set()).add(name)
    assert profiles.keys() == {"", "cpu", "vllm-cpu", "gpu", "observe"}
    assert profiles[""] & set(OURS) == always
    assert profiles["cpu"] == {"engine", "trainer"}
    assert profiles["vllm-cpu"] == {"engine-vllm-cpu", "trainer"}
    assert profiles["gpu"] == {"engine-gpu", "trainer-gpu"}
    assert profiles["observe"] == {"reader", "metrics", "prometheus", "grafana"}


def test_gpu_services_get_gpus() -> None:
    for name in ("engine-gpu", "trainer-gpu"):
        (devices,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])


def test_every_profiles_engine_is_found_as_the_same_one_and_has_an_image() -> None:
    engines = [name for name in OURS if name.startswith("engine")]
    assert len(engines) == 3
    dockerfile = (ROOT / "Dockerfile").read_text()
    for name in engines:
        aliases = SERVICES[name].get("networks", {}).get("default", {}).get("aliases", [name])
        assert aliases == ["engine"]
        assert f"http://{aliases[0]}:8100" == SERVICES[name]["environment"]["ROLLBOOK_ENGINES"]
        target = SERVICES[name]["build"]["target"]
        assert re.search(rf"^FROM .* AS {target}$", dockerfile, re.MULTILINE), target
    vllm = [name for name in engines if "vllm" in SERVICES[name]["command"]]
    assert vllm == ["engine-vllm-cpu", "engine-gpu"]
    assert (ROOT / "requirements-vllm-cpu.txt").exists()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = wanted["optional-dependencies"]["vllm"]
    assert f"vllm/vllm-openai:v{pinned.removeprefix('vllm==')}" in dockerfile


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
    assert given <= {*VARIABLES.values(), "ROLLBOOK_READER_PASSWORD"}
    assert given >= set(VARIABLES.values()) - ELSEWHERE


def test_ports_are_bound_to_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_have_no_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for secret in SECRETS:
        uses = re.findall(rf"\$\{{{secret}([^}}]*)\}}", text)
        assert uses
        assert all(use.startswith(":?") for use in uses), secret
        assert f"{secret}=\n" in (ROOT / ".env.example").read_text()


def test_images_are_pinned() -> None:
    for name, service in SERVICES.items():
        image = service["image"]
        assert re.search(r":(\d|v\d|local$)", image), name


@pytest.mark.parametrize(
    "name", [n for n in OURS if n.startswith(("worker", "trainer", "engine", "gateway"))]
)
def test_processes_get_time_to_stop(name: str) -> None:
    assert int(OURS[name]["stop_grace_period"].rstrip("s")) >= 60


def test_what_serves_has_a_health_check_and_what_runs_once_is_waited_for() -> None:
    """Workers have none: they answer nothing; the supervisor sees that they live."""
    quiet = {n for n in SERVICES if n.startswith(("worker", "trainer"))} | {"temporal-ui"}
    for name, service in SERVICES.items():
        assert ("healthcheck" in service) == (name not in ONCE | quiet), name
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if needed in ONCE else "service_healthy"
            assert how["condition"] == wanted, (name, needed)


@pytest.mark.parametrize(
    "mounted", sorted(m for s in SERVICES.values() for m in s.get("volumes", []) if ":ro" in m)
)
def test_what_is_mounted_is_there(mounted: str) -> None:
    source = mounted.split(":")[0]
    assert source == "./runs" or (ROOT / source).exists()


def test_prometheus_scrapes_what_serves_figures() -> None:
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {t for job in scraped for c in job["static_configs"] for t in c["targets"]}
    assert targets == {"metrics:9464", "engine:8100"}
    for target in targets:
        name, port = target.split(":")
        assert port in SERVICES[name]["command"]
