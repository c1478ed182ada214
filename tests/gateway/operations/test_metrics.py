"""The gateway's metrics, read back as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from mlxpool.gateway.operations.exchange import CLIENT_DISCONNECTED, OTHER_ROUTE, Exchange
from mlxpool.gateway.operations.metrics import Metrics

CHAT = "/v1/chat/completions"


def values(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Returns the value of each sample of the metrics, by the sample's name and labels."""

    def rows() -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
        data, content_type = metrics.text("text/plain")
        assert content_type.startswith("text/plain; version=")
        for family in text_string_to_metric_families(data.decode()):
            for sample in family.samples:
                yield (sample.name, frozenset(sample.labels.items())), sample.value

    return dict(rows())


def of(metrics: Metrics, name: str, **labels: str) -> float:
    return values(metrics)[f"mlxpool_gateway_{name}", frozenset(labels.items())]


def test_a_request_is_counted_by_route_and_status() -> None:
    metrics = Metrics("1.2", [CHAT])
    exchange = Exchange("id", "POST", CHAT, started=10.0)
    metrics.begun(exchange)
    assert of(metrics, "requests_in_flight", route=CHAT) == 1
    exchange.status, exchange.first_token = 200, 10.3
    exchange.count({"prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": 3})
    metrics.ended(exchange, 12.0)
    assert of(metrics, "requests_in_flight", route=CHAT) == 0
    assert of(metrics, "requests_total", route=CHAT, status="200") == 1
    assert of(metrics, "time_to_first_token_seconds_bucket", route=CHAT, le="0.5") == 1
    assert of(metrics, "time_to_first_token_seconds_bucket", route=CHAT, le="0.25") == 0
    assert of(metrics, "request_duration_seconds_sum", route=CHAT) == 2
    tokens = [of(metrics, f"{name}_tokens_total", route=CHAT) for name in ("prompt", "cached")]
    assert tokens == [5, 2] and of(metrics, "generation_tokens_total", route=CHAT) == 3
    assert of(metrics, "stream_failures_total", route=CHAT, cause="error") == 0
    assert of(metrics, "build_info", version="1.2") == 1


def test_a_stream_that_fails_after_its_head_is_counted_apart() -> None:
    metrics = Metrics("1.2", [CHAT])
    for failure in ("worker_lost", "worker_lost", CLIENT_DISCONNECTED):
        exchange = Exchange("id", "POST", CHAT, started=0.0, status=200, failure=failure)
        metrics.begun(exchange)
        metrics.ended(exchange, 1.0)
    assert of(metrics, "stream_failures_total", route=CHAT, cause="error") == 2
    assert of(metrics, "stream_failures_total", route=CHAT, cause="disconnect") == 1


def test_series_exist_before_the_first_request_and_none_has_a_time_of_creation() -> None:
    series = values(Metrics("1.2", [CHAT]))
    for route in (CHAT, OTHER_ROUTE):
        labels = frozenset({"route": route, "status": "200"}.items())
        assert series["mlxpool_gateway_requests_total", labels] == 0
    assert not [name for name, _ in series if name.endswith("_created")]


def test_the_drain_is_shown_and_the_format_is_negotiated() -> None:
    metrics = Metrics("1.2", [CHAT])
    assert of(metrics, "draining") == 0
    metrics.drain_begun()
    assert of(metrics, "draining") == 1
    data, content_type = metrics.text("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and data.endswith(b"# EOF\n")
    families = openmetrics_families(data.decode())  # type: ignore[no-untyped-call]
    kinds = {family.name: family.type for family in families}
    assert kinds["mlxpool_gateway_requests"] == "counter"


def test_the_process_is_measured() -> None:
    series = values(Metrics("1.2", [CHAT]))
    names = ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
    assert all(series[f"process_{name}", frozenset()] > 0 for name in names)
