"""Temporal's interceptor for OpenTelemetry, kept to traces that somebody began.

The steward asks and signals workflows all the time; each such call would be a trace of its own.
"""

from typing import Any

from opentelemetry import trace
from temporalio.client import (
    OutboundInterceptor,
    QueryWorkflowInput,
    SignalWorkflowInput,
    StartWorkflowInput,
    WorkflowHandle,
)
from temporalio.contrib.opentelemetry import TracingInterceptor


class Continuing(TracingInterceptor):
    """Continues traces; begins none."""

    def __init__(self) -> None:
        super().__init__(trace.get_tracer("rollbook.temporal"))

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        """Calls inside a span are traced, others are not."""
        return _WithinSpan(next, super().intercept_client(next))


class _WithinSpan(OutboundInterceptor):
    def __init__(self, plain: OutboundInterceptor, traced: OutboundInterceptor) -> None:
        super().__init__(plain)
        self._traced = traced

    def _chosen(self) -> OutboundInterceptor:
        inside = trace.get_current_span().get_span_context().is_valid
        return self._traced if inside else self.next

    async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:
        return await self._chosen().start_workflow(input)

    async def query_workflow(self, input: QueryWorkflowInput) -> Any:
        return await self._chosen().query_workflow(input)

    async def signal_workflow(self, input: SignalWorkflowInput) -> None:
        await self._chosen().signal_workflow(input)
