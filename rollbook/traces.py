"""OpenTelemetry behind `domain.tracing`, switched on by the standard OTEL_* variables.

    OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT)   where spans go, as OTLP over HTTP
    OTEL_TRACES_EXPORTER       none: off; console: to standard error; otlp: also to the default address
    OTEL_SDK_DISABLED=true     off
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*: as the SDK says

A process that has a tracer provider of its own already (a training loop that traces itself) keeps it.
Workflows are traced by Temporal's own interceptor, which adds headers and never a command, so that
histories replay with it and without it.
"""

import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from domain import tracing
from domain.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Tracer
    from temporalio.client import Interceptor

_ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = ("otlp", "console")


def exporter(environ: Mapping[str, str]) -> str | None:
    """Which exporter the environment asks for; None: traces are off.

    Raises:
        ConfigError: one that rollbook does not have.
    """
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    named = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if named == "none":
        return None
    if named and named not in _EXPORTERS:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER = {named!r} is not supported; use {', '.join(_EXPORTERS)} or none"
        )
    if named:
        return named
    return "otlp" if any(environ.get(name) for name in _ADDRESSES) else None


def start(process: str, environ: Mapping[str, str]) -> None:
    """Trace this process if the environment asks for it. Spans are sent until it exits.

    Args:
        process: its kind, the end of the service name unless OTEL_SERVICE_NAME is set.
        environ: of the process.

    Raises:
        ConfigError: the extra `otel` is not installed, or the exporter is unknown.
    """
    chosen = exporter(environ)
    if chosen is None or tracing.is_on():
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError as error:
        raise ConfigError(
            "OTEL_* asks for traces, which need OpenTelemetry; pip install 'rollbook[otel]', or set "
            "OTEL_SDK_DISABLED=true"
        ) from error
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(_provider(chosen, process, environ))
    tracing.backend = OpenTelemetry(trace.get_tracer("rollbook"))


def _provider(chosen: str, process: str, environ: Mapping[str, str]) -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        ConsoleSpanExporter,
        SpanExporter,
    )

    sending: SpanExporter
    if chosen == "console":
        sending = ConsoleSpanExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        sending = OTLPSpanExporter()
    name = environ.get("OTEL_SERVICE_NAME") or f"rollbook-{process}"
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: name}), id_generator=_unseeded()
    )
    provider.add_span_processor(BatchSpanProcessor(sending))
    return provider


def _unseeded() -> "IdGenerator":
    """Ids that a trainer's seeds neither repeat nor are moved by: the SDK's own draw from `random`."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Unseeded(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    return Unseeded()


def interceptors() -> "list[Interceptor]":
    """What a Temporal client, and the workers made of it, need to continue traces; none when off."""
    if not tracing.is_on():
        return []
    from rollbook.temporal_traces import Continuing

    return [Continuing()]


class OpenTelemetry:
    """`domain.tracing.Backend`."""

    def __init__(self, tracer: "Tracer") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._w3c = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, tracing.Attribute]) -> Iterator[None]:
        """A span around the block."""
        with self._tracer.start_as_current_span(name, attributes=dict(attributes)):
            yield

    def note(self, attributes: Mapping[str, tracing.Attribute]) -> None:
        """Add attributes to the current span."""
        from opentelemetry import trace

        trace.get_current_span().set_attributes(dict(attributes))

    def link(self, traceparents: Iterable[str]) -> None:
        """Link the current span to others."""
        from opentelemetry import trace

        current = trace.get_current_span()
        for traceparent in sorted(set(traceparents)):
            context = self._w3c.extract({"traceparent": traceparent})
            found = trace.get_current_span(context).get_span_context()
            if found.is_valid:
                current.add_link(found)

    def carrier(self) -> dict[str, str]:
        """The current span in W3C's words."""
        found: dict[str, str] = {}
        self._w3c.inject(found)
        return found

    @contextmanager
    def continued(self, carrier: Mapping[str, Any]) -> Iterator[None]:
        """The block belongs to the trace that `carrier` names."""
        from opentelemetry import context

        named = {key: str(carrier[key]) for key in self._w3c.fields if carrier.get(key)}
        if not named:
            yield
            return
        token = context.attach(self._w3c.extract(named))
        try:
            yield
        finally:
            context.detach(token)
