"""Requests as spans of OpenTelemetry: one for each that has ended, with its parts inside.

The setting `traces` turns them on. The variables of OpenTelemetry say where they go, such as
OTEL_EXPORTER_OTLP_ENDPOINT; a thread of its library sends them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mlxpool.broker.core.actions import RequestEnded
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.trace_context import parent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NAME = "mlxpool"
CLOSE_MS = 2000  # that the last spans may take at the end of the broker


class Part(NamedTuple):
    """A part of a request. Times are seconds on the clock of its record."""

    name: str
    begin: float
    end: float


def parts_of(ended: RequestEnded) -> Iterator[Part]:
    """The parts of a request: queue, prepare, prefill, decode, and each resume.

    Those in the worker are of the newest one; they are as long as it says, one behind the other.
    """
    assigned = ended.assigned_at
    yield Part("queue", ended.accepted_at, assigned or ended.ended_at)
    for lost, again in ended.resumes:
        yield Part("resume", lost, again)
    if not assigned:
        return
    at = ended.resumes[-1][1] if ended.resumes else assigned
    for name in ("prepare", "prefill", "decode"):
        if name in ended.timings_ms:
            end = min(at + ended.timings_ms[name] / 1000, ended.ended_at)
            yield Part(name, at, end)
            at = end


class Spans:
    """Used by the broker's thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(NAME)

    @classmethod
    def open(cls) -> Spans:
        """Spans that are sent by OTLP over HTTP. Raises ConfigError without OpenTelemetry."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"traces is true, which needs OpenTelemetry ({error}): pip install 'mlxpool[otel]',"
                " or leave traces out of [pool]"
            ) from error
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": NAME}
        provider = TracerProvider(resource=Resource.create(named))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def add(self, ended: RequestEnded, now: float) -> None:
        """Make the spans of a request that has ended; `now` is on the clock of its record."""
        from opentelemetry import trace

        offset = time.time() - now

        def nanoseconds(seconds: float) -> int:
            return int((seconds + offset) * 1e9)

        parent, context = parent_of(ended.traceparent), None
        if parent is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else 0)
            of_client = trace.SpanContext(parent.trace, parent.span, True, flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(of_client))
        span = self._tracer.start_span(
            f"generate {ended.model}",
            context,
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": ended.model,
                "gen_ai.usage.input_tokens": ended.prompt_tokens,
                "gen_ai.usage.output_tokens": ended.tokens,
                "mlxpool.request.id": ended.id.hex(),
                "mlxpool.outcome": ended.outcome,
                "mlxpool.attempts": ended.attempts,
            },
            start_time=nanoseconds(ended.accepted_at),
        )
        if ended.failed:
            span.set_status(trace.StatusCode.ERROR, ended.outcome)
        inside = trace.set_span_in_context(span)
        for part in parts_of(ended):
            child = self._tracer.start_span(part.name, inside, start_time=nanoseconds(part.begin))
            child.end(nanoseconds(part.end))
        span.end(nanoseconds(ended.ended_at))

    def close(self) -> None:
        """Send what is left, for a moment."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()
