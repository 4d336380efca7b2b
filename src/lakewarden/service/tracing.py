"""Traces for OpenTelemetry, if somebody wants them; without, nothing of it is imported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

import lakewarden
from lakewarden.errors import ErrorKind, UsageError
from lakewarden.jobs.tasks import Claim

#: Ids of tasks that a trace names, of those that share a run.
_IDS_MAX = 100


class Span(Protocol):
    """One request, as a trace shows it."""

    def end(self, route: str, status: int) -> None:
        """Tell what became of it."""
        ...


class Tracing(Protocol):
    """Says of every request, and of every run of tasks, that it began and how it ended."""

    @contextmanager
    def request(self, scope: Scope, headers: Headers) -> Iterator[Span]:
        """Surround a request."""
        ...

    @contextmanager
    def batch(self, claims: Sequence[Claim]) -> Iterator[None]:
        """Surround a run of tasks that were picked together."""
        ...


class NoTracing:
    """Nobody wants traces."""

    @contextmanager
    def request(self, scope: Scope, headers: Headers) -> Iterator[Span]:  # noqa: ARG002
        yield self

    def end(self, route: str, status: int) -> None:
        pass

    @contextmanager
    def batch(self, claims: Sequence[Claim]) -> Iterator[None]:  # noqa: ARG002
        yield


class OpenTelemetry:
    """Tells a tracer; what the caller's own trace is called is taken from the headers."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.propagate import extract  # noqa: PLC0415  # optional
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415  # optional

        self._tracer = tracer
        self._extract = extract
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    @contextmanager
    def request(self, scope: Scope, headers: Headers) -> Iterator[Span]:
        parent = self._extract(dict(headers))
        method = scope["method"]
        with self._tracer.start_as_current_span(method, context=parent, kind=self._kind) as span:
            yield _OpenSpan(span, method, self._failed)

    @contextmanager
    def batch(self, claims: Sequence[Claim]) -> Iterator[None]:
        first = claims[0]
        told: dict[str, Any] = {
            "lakewarden.queue": first.queue,
            "lakewarden.tasks": len(claims),
            "lakewarden.task_ids": [str(claim.task_id) for claim in claims[:_IDS_MAX]],
        }
        if first.scope.warehouse_id is not None:
            told["lakewarden.warehouse_id"] = str(first.scope.warehouse_id)
        with self._tracer.start_as_current_span(f"run {first.queue}", attributes=told):
            yield


class _OpenSpan:
    def __init__(self, span: Any, method: str, failed: Any) -> None:
        self._span = span
        self._method = method
        self._failed = failed

    def end(self, route: str, status: int) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.request.method", self._method)
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(self._failed)


def tracing_to(endpoint: str | None) -> Tracing:
    """Return what sends traces to a collector, or to nobody without an endpoint."""
    if endpoint is None:
        return NoTracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise UsageError(
            ErrorKind.USAGE,
            f"traces need OpenTelemetry, which does not load ({error.name}); "
            "pip install 'lakewarden[tracing]', or leave --otlp-endpoint and its variables out",
        ) from error
    resource = Resource.create(
        {"service.name": "lakewarden", "service.version": lakewarden.__version__}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OpenTelemetry(provider.get_tracer("lakewarden"))
