"""Sends traces to an OpenTelemetry collector by OTLP over HTTP, if one is configured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
from opentelemetry.trace import NoOpTracer, Span, Tracer, set_span_in_context

from kvshelf._extras import needs_extra
from kvshelf.errors import MissingExtra

if TYPE_CHECKING:
    from kvshelf.api.answers import Phase

log = structlog.get_logger("kvshelf.service")

_STANDARD = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORT_S = 3.0  # per export; limits how long a hanging collector can delay the end of the service


@contextmanager
def tracer_to(endpoint: str | None) -> Iterator[Tracer]:
    """A tracer for the duration of a block; the end of the block sends the remaining spans.

    endpoint: address of the collector, such as http://host:4318/v1/traces. Without it OpenTelemetry's own environment
    variables apply; without those nothing is traced. Raises `MissingExtra` if `endpoint` is set but the extra absent.
    """
    if endpoint is None and not any(os.environ.get(name) for name in _STANDARD):
        yield NoOpTracer()
        return
    try:
        with needs_extra("otel", "sending traces"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except MissingExtra as error:
        if endpoint is not None:
            raise
        # Not an error: the variable may be meant for other programs on this machine.
        log.warning("no traces are sent", message=error.message)
        yield NoOpTracer()
        return
    name = os.environ.get("OTEL_SERVICE_NAME", "kvshelf")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)))
    try:
        yield provider.get_tracer("kvshelf")
    finally:
        provider.shutdown()


def add_phases(tracer: Tracer, span: Span, began_ns: int, phases: Sequence[Phase]) -> None:
    """Adds a child of `span` for each phase of a call that began at `began_ns` (Unix time).

    Called when the reply has arrived: replicas report only durations, because their clocks may differ.
    """
    parent = set_span_in_context(span)
    for phase in phases:
        start = began_ns + round(phase.start_s * 1e9)
        tracer.start_span(phase.name, context=parent, start_time=start).end(start + round(phase.seconds * 1e9))
