"""Spans on their way to a collector: OTLP over HTTP with OpenTelemetry's exporter (extra `otel`).

The exporter has a thread and a bounded queue of its own; spans beyond it are dropped, and a collector that does not answer
costs the loop nothing. Only this file knows OpenTelemetry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway.observe.tracing import Span

EXPORT_EVERY_MS = 1_000
EXPORT_TIMEOUT_S = 5.0
QUEUE_MAX = 8_192
CLOSE_S = 3.0

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_FLAGS = TraceFlags(TraceFlags.SAMPLED)


class OtlpSpans:
    """Sends spans until closed."""

    def __init__(self, url: str, *, version: str, instance: str, wall_offset_s: Callable[[], float]) -> None:
        """url: the collector's, whole (…/v1/traces). wall_offset_s: what added to the monotonic clock gives wall time."""
        self._resource = Resource(
            {"service.name": "headrace", "service.version": version, "service.instance.id": instance}
        )
        self._scope = InstrumentationScope("headrace", version)
        self._wall_offset_s = wall_offset_s
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S),
            max_queue_size=QUEUE_MAX,
            schedule_delay_millis=EXPORT_EVERY_MS,
        )

    def take(self, spans: list[Span]) -> None:
        """Queue the spans of one request."""
        offset_s = self._wall_offset_s()
        for span in spans:
            self._processor.on_end(self._readable(span, offset_s))

    async def close(self) -> None:
        """Send what is queued, for at most CLOSE_S; what a collector does not take then is lost."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.to_thread(self._processor.shutdown)
        except TimeoutError:
            return

    def _readable(self, span: Span, offset_s: float) -> ReadableSpan:
        trace_id = int(span.trace_id, 16)
        parent = (
            SpanContext(trace_id, int(span.parent_id, 16), is_remote=span.kind == "server") if span.parent_id else None
        )
        return ReadableSpan(
            span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_FLAGS),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS.get(span.kind, SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, span.failed) if span.failed else Status(),
            start_time=int((span.from_s + offset_s) * 1e9),
            end_time=int((span.to_s + offset_s) * 1e9),
            instrumentation_scope=self._scope,
        )
