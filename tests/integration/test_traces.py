"""Traces of a real run: a tiny receiver takes what every process sends, and the test reads the tree."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from psycopg import conninfo, sql
from temporalio.contrib.opentelemetry import TracingInterceptor
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from domain import tracing
from domain.errors import ConfigError
from domain.services import Services
from rollbook import traces
from rollbook.root import ROOT
from storage import runs
from storage.database import Ledger
from tests.replay.test_histories import HISTORIES, WORKFLOWS, read
from tests.short_run import configuration, train

pytestmark = pytest.mark.timeout(300)

STEPS = 3


@dataclass(frozen=True)
class Span:
    """One span, as it arrived."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[tuple[str, str], ...]
    facts: dict[str, str]


class Receiver:
    """An OTLP collector that keeps everything."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        keep = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                keep.extend(_read(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _read(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        names = {a.key: a.value.string_value for a in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=names["service.name"],
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    facts={
                        a.key: str(getattr(a.value, a.value.WhichOneof("value") or "string_value"))
                        for a in span.attributes
                    },
                )


@contextmanager
def database(services: Services, template: str, name: str) -> Iterator[Services]:
    with psycopg.connect(services.database_url, autocommit=True) as admin:
        admin.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    parts = conninfo.conninfo_to_dict(services.database_url)
    yield services.model_copy(
        update={
            "database_url": f"postgresql://{parts['user']}:{parts['password']}"
            f"@{parts['host']}:{parts['port']}/{name}",
            "temporal_namespace": name.replace("_", "-"),
        }
    )


@pytest.fixture(scope="module")
def spans(
    services: Services, ledger_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Span]]:
    """What all processes of a short run sent."""
    state = tmp_path_factory.mktemp("traced")
    receiver = Receiver()
    with (
        database(services, ledger_template, "traced_run") as own,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        config = configuration(state / "source").model_copy(update={"steps": STEPS})
        ledger = Ledger.open(own.database_url, pool=1, application="traced run")
        ledger.call(runs.create, config, world={})
        train(config, own, state)
        assert ledger.call(runs.read, config.name).state == "finished"
        ledger.close()
    yield receiver.spans
    receiver.close()


def ancestors(span: Span, known: dict[str, Span]) -> list[Span]:
    """From a span's parent up to the root."""
    found = []
    while span.parent:
        span = known[span.parent]
        found.append(span)
    return found


def test_one_trace_leads_from_the_step_through_the_group_to_the_engine(spans: list[Span]) -> None:
    known = {span.id: span for span in spans}
    paths = [
        [(a.service, a.name) for a in (span, *ancestors(span, known))]
        for span in spans
        if span.name == "sample"
    ]
    assert len(known) == len(spans)
    for path in set(map(tuple, paths)) or {()}:
        told = "\n".join(f"{service} {name}" for service, name in path)
        assert told.splitlines() == [
            "rollbook-engine sample",
            "rollbook-worker-rollouts engine call",
            "rollbook-worker-rollouts RunActivity:run_attempt",
            "rollbook-worker-workflows StartActivity:run_attempt",
            "rollbook-worker-ledger StartWorkflow:GroupWorkflow",
            "rollbook-trainer plan",
            "rollbook-trainer step",
        ]
    groups = [span for span in spans if span.name == "RunWorkflow:GroupWorkflow"]
    assert {known[span.parent].name for span in groups} == {"StartWorkflow:GroupWorkflow"}
    call = next(span for span in spans if span.name == "engine call")
    assert call.facts["policy"].startswith("reverse3@")
    assert int(call.facts["sampled_tokens"]) > 0


def test_a_step_is_linked_to_the_steps_that_submitted_what_it_trains(spans: list[Span]) -> None:
    steps = {int(span.facts["step"]): span for span in spans if span.name == "step"}
    assert set(steps) >= set(range(STEPS))
    plans = {span.id: span for span in spans if span.name == "plan"}
    for number in range(STEPS):
        assert steps[number].links
        for trace, id in steps[number].links:
            assert plans[id].trace == trace
            assert int(plans[id].facts["step"]) <= number
    submitted = {span.parent for span in spans if span.name == "StartWorkflow:GroupWorkflow"}
    linked = {id for step in steps.values() for _, id in step.links}
    assert linked <= submitted


def test_a_publication_belongs_to_the_step_that_wanted_it(spans: list[Span]) -> None:
    known = {span.id: span for span in spans}
    loads = [span for span in spans if span.name == "RunActivity:load_version"]
    assert loads
    for load in loads:
        assert [a.name for a in ancestors(load, known)][-2:] == ["publish", "step"]


def test_nobody_begins_a_trace_but_the_trainer(spans: list[Span]) -> None:
    assert {(span.service, span.name) for span in spans if not span.parent} == {
        ("rollbook-trainer", "step")
    }


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_histories_of_untraced_workflows_replay_traced(path: Path) -> None:
    replayer = Replayer(
        workflows=WORKFLOWS,
        data_converter=pydantic_data_converter,
        interceptors=[TracingInterceptor()],
    )
    await replayer.replay_workflow(read(path))


OFF = """
import os, sys
from rollbook import traces
from domain import tracing
import activities.gateway, activities.relay, activities.sampler, rollbook.workers, rollbook.temporal
import engine.app, trainer.loop
traces.start("trainer", os.environ)
assert not tracing.is_on()
assert traces.interceptors() == []
assert tracing.span("a", run="r") is tracing.span("b")
assert tracing.carrier() == {}
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


@pytest.mark.parametrize(
    "variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}]
)
def test_off_means_that_nothing_is_imported(variables: dict[str, str]) -> None:
    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} if variables else {}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    subprocess.run(
        [sys.executable, "-c", OFF],
        env={**environ, **address, **variables, "PYTHONPATH": str(ROOT)},
        check=True,
    )


def test_an_exporter_that_rollbook_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER = 'zipkin'.*otlp, console"):
        traces.exporter({"OTEL_TRACES_EXPORTER": "zipkin"})
    assert traces.exporter({"OTEL_TRACES_EXPORTER": "console"}) == "console"
    assert traces.exporter({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318"}) == "otlp"
    assert not tracing.is_on()
