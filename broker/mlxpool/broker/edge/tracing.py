"""Writes traces: events and actions into the history file, requests as OpenTelemetry spans."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import RequestEnded
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.protocol import to_client, to_worker
from mlxpool.common.protocol.deltas import Deltas
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.trace import History
from mlxpool.common.trace_context import parent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


# ---- trace ---------------------------------------------------------------------------------------
# The broker's lines in the history file: events and actions, without prompts and completions.


def of_event(history: History, event: ev.Event) -> None:
    """Writes an event as a line of the history file."""
    write = _EVENTS.get(type(event))
    if write is not None:
        write(history, event)


def of_action(history: History, action: act.Action) -> None:
    """Writes an action as a line of the history file."""
    if isinstance(action, act.ToClient):
        _to_client(history, action)
    elif isinstance(action, act.ToWorker) and action.header.kind == to_worker.Work.kind:
        header, message = action.header, action.message
        resume = message.resume if isinstance(message, to_worker.Work) else None
        count = 0 if resume is None else resume.count
        history.write(
            "work", id=header.id, slot=action.slot, epoch=header.epoch, run=header.attempt,
            count=count,
        )  # fmt: skip
    elif isinstance(action, act.StartWorker | act.StopWorker | act.DumpStacks):
        history.write(type(action).__name__, slot=action.slot)
    elif isinstance(action, act.Note) and action.event != "request":
        history.write("note", event=action.event, **dict(action.fields))


def _to_client(history: History, action: act.ToClient) -> None:
    header, message = action.header, action.message
    if isinstance(message, Deltas):
        for row in message.rows:
            history.write("sent", id=row.id, attempt=row.attempt, pos=row.pos, n=row.n)
    elif isinstance(message, StreamDelta):
        history.write("sent", id=header.id, attempt=header.attempt, pos=header.pos, n=message.count)
    elif isinstance(message, to_client.Accepted | to_client.Done | to_client.Failed):
        outcome = None
        if isinstance(message, to_client.Done):
            outcome = message.reason
        elif isinstance(message, to_client.Failed):
            outcome = message.code
        history.write(
            header.kind, id=header.id, attempt=header.attempt, pos=header.pos, outcome=outcome
        )


def _rows(history: History, event: ev.WorkerDeltas) -> None:
    for row in event.rows:
        end = None if row.end is None else row.end.get("code") or row.end.get("reason")
        history.write(
            "taken", id=row.id, run=row.attempt, epoch=event.epoch, pos=row.pos, n=row.n,
            end=end,
        )  # fmt: skip


_EVENTS: dict[type, Callable[..., None]] = {
    ev.ClientGenerate: lambda h, e: h.write("generate", id=e.id, attempt=e.attempt, link=e.link),
    ev.StartJob: lambda h, e: h.write("start_job", id=e.id, attempt=e.attempt, alone=e.alone),
    ev.CancelRequest: lambda h, e: h.write("cancel", id=e.id),
    ev.WorkerDeltas: _rows,
    ev.WorkerHello: lambda h, e: h.write("hello", slot=e.slot, epoch=0),
    ev.WorkerYield: lambda h, e: h.write("yield", epoch=e.epoch, runs=len(e.message.runs)),
    ev.WorkerExited: lambda h, e: h.write("exited", slot=e.slot, cause=e.cause, own=e.own),
    ev.LinkLost: lambda h, e: h.write("link_lost", link=e.link),
    ev.Late: lambda h, e: h.write("late", seconds=e.seconds),
}


# ---- spans ---------------------------------------------------------------------------------------
# OpenTelemetry spans: a span for each ended request, with child spans of its phases.
# The setting `traces` enables them. Variables of OpenTelemetry set their target, such as
# OTEL_EXPORTER_OTLP_ENDPOINT; a thread of its library sends them.


NAME = "mlxpool"
CLOSE_MS = 2000  # most milliseconds for the last spans at the end of the broker


class Part(NamedTuple):
    """A phase of a request, such as prefill. Times are seconds on the core's clock."""

    name: str
    begin: float
    end: float


def parts_of(ended: RequestEnded) -> Iterator[Part]:
    """Yields the phases of a request: queue, prepare, prefill, decode, and each resume.

    Phases in a worker are those of the newest worker. They follow each other, with the durations
    that the worker reported.
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
    """Exports ended requests as OpenTelemetry spans. Owned by the broker's thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(NAME)

    @classmethod
    def open(cls) -> Spans:
        """Returns Spans that send OTLP over HTTP.

        Raises ConfigError if OpenTelemetry is not installed.
        """
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
        """Sends the spans of an ended request. `now` is on the clock of `ended`."""
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
        """Sends the remaining spans, within CLOSE_MS milliseconds."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()
