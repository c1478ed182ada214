"""Spans of ended requests, as OpenTelemetry's library receives them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core.actions import RequestEnded
from mlxpool.broker.edge.tracing import Part, Spans, parts_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def ended(**more: Any) -> RequestEnded:
    fields: dict[str, Any] = {
        "id": bytes(16),
        "model": "m",
        "traceparent": f"00-{TRACE}-{SPAN}-01",
        "outcome": "stop",
        "failed": False,
        "accepted_at": 100.0,
        "assigned_at": 102.0,
        "ended_at": 109.0,
        "resumes": (),
        "timings_ms": {"prepare": 500.0, "prefill": 1000.0, "decode": 2000.0},
        "prompt_tokens": 7,
        "tokens": 5,
        "attempts": 1,
    }
    return RequestEnded(**{**fields, **more})


def test_the_parts_of_a_request() -> None:
    assert list(parts_of(ended())) == [
        Part("queue", 100.0, 102.0),
        Part("prepare", 102.0, 102.5),
        Part("prefill", 102.5, 103.5),
        Part("decode", 103.5, 105.5),
    ]


def test_the_parts_behind_a_resume_are_of_the_newest_worker() -> None:
    parts = list(parts_of(ended(resumes=((103.0, 104.0), (105.0, 106.0)))))
    assert [part.name for part in parts][1:3] == ["resume", "resume"]
    assert parts[1:3] == [Part("resume", 103.0, 104.0), Part("resume", 105.0, 106.0)]
    assert parts[3] == Part("prepare", 106.0, 106.5)
    assert parts[-1] == Part("decode", 107.5, 109.0), "it ends with the request"


def test_a_request_that_no_worker_had_was_queued() -> None:
    assert list(parts_of(ended(assigned_at=0.0))) == [Part("queue", 100.0, 109.0)]


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{SPAN}-01", ""])
def test_spans_have_the_clients_for_a_parent(traceparent: str) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="mlxpool[otel] is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    kept, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    spans = Spans(provider)
    spans.add(ended(traceparent=traceparent, failed=True, outcome="worker_lost"), 110.0)
    *parts, whole = kept.get_finished_spans()
    assert [part.name for part in parts] == ["queue", "prepare", "prefill", "decode"]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    assert whole.end_time - whole.start_time == pytest.approx(9e9, abs=1e6)
    assert not whole.status.is_ok and whole.attributes["mlxpool.outcome"] == "worker_lost"
    if traceparent:
        assert whole.parent.span_id == int(SPAN, 16) and whole.parent.is_remote
        assert {span.context.trace_id for span in (whole, *parts)} == {int(TRACE, 16)}
    else:
        assert whole.parent is None
    unsampled = ended(traceparent=f"00-{TRACE}-{SPAN}-00")
    spans.add(unsampled, 110.0)
    assert len(kept.get_finished_spans()) == 5, "a client that records nothing is followed"
    spans.close()
