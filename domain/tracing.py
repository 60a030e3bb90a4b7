"""Spans of one trace over all processes: a trainer's step, its groups, their attempts, engine calls.

Off unless the process was started with the standard OTEL_* variables (`rollbook/traces.py` reads
them and puts the OpenTelemetry SDK behind `backend`). Off means that nothing is imported and that a
span is one shared context manager that does nothing.

What crosses a boundary is a W3C `traceparent`: `carrier()` gives it, `continued()` takes it up on the
other side. It rides on outbox commands, in Temporal's headers and in HTTP headers, never in what a
workflow computes with.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

Attribute = str | int | float | bool


class Backend(Protocol):
    """What makes spans of the calls below."""

    def span(
        self, name: str, attributes: Mapping[str, Attribute]
    ) -> AbstractContextManager[None]: ...

    def note(self, attributes: Mapping[str, Attribute]) -> None: ...

    def link(self, traceparents: Iterable[str]) -> None: ...

    def carrier(self) -> dict[str, str]: ...

    def continued(self, carrier: Mapping[str, Any]) -> AbstractContextManager[None]: ...


backend: Backend | None = None
"""Of this process; set once, before its work begins."""

_NOTHING: AbstractContextManager[None] = nullcontext()


def is_on() -> bool:
    """Whether spans are recorded."""
    return backend is not None


def span(name: str, **attributes: Attribute) -> AbstractContextManager[None]:
    """A span around the block, child of the one that is current; an exception marks it as failed."""
    return _NOTHING if backend is None else backend.span(name, attributes)


def note(**attributes: Attribute) -> None:
    """Add what became known meanwhile to the current span."""
    if backend is not None:
        backend.note(attributes)


def link(traceparents: Iterable[str]) -> None:
    """Link the current span to others, by their `traceparent`."""
    if backend is not None:
        backend.link(traceparents)


def carrier() -> dict[str, str]:
    """The current span as `traceparent` (and `tracestate`, if there is one); empty without one."""
    return {} if backend is None else backend.carrier()


def continued(carrier: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within the block, spans are children of the one that `carrier` names, if it names one."""
    return _NOTHING if backend is None else backend.continued(carrier)
