"""The gateway's metrics, in the text formats of Prometheus.

Labels have few values, known beforehand: routes of the table and statuses; never a path, a key, a
model that a client named, or an id. The broker's own metrics have the figures of each model.
"""

from __future__ import annotations

from collections.abc import Iterable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from mlxpool.gateway.operations.exchange import CLIENT_DISCONNECTED, FURTHER_ROUTES, Exchange

# Upper bounds in seconds; those of the broker's histograms of the same things.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
DURATION_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
PREFIX = "mlxpool_gateway"
CAUSES = ERROR, DISCONNECT = "error", "disconnect"  # of streams that end before their end


class Metrics:
    """Used by the event loop's thread alone."""

    def __init__(self, version: str, routes: Iterable[str]) -> None:
        """`routes`: all that can be counted; their series begin at 0, so that rates are right."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            f"{PREFIX}_requests", "Answered requests.", ("route", "status"), registry=registry
        )
        self._in_flight = Gauge(
            f"{PREFIX}_requests_in_flight",
            "Requests that are being answered.",
            ("route",),
            registry=registry,
        )
        self._duration = Histogram(
            f"{PREFIX}_request_duration_seconds",
            "Time from a request's headers to the end of its response.",
            ("route",),
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "Time from a request's headers to its first token.",
            ("route",),
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._prompt = Counter(
            f"{PREFIX}_prompt_tokens", "Tokens of prompts.", ("route",), registry=registry
        )
        self._cached = Counter(
            f"{PREFIX}_cached_tokens",
            "Tokens of prompts that the prefix cache had.",
            ("route",),
            registry=registry,
        )
        self._completion = Counter(
            f"{PREFIX}_generation_tokens", "Tokens generated.", ("route",), registry=registry
        )
        self._failures = Counter(
            f"{PREFIX}_stream_failures",
            "Responses with the status 200 that ended with an error, or whose client was gone.",
            ("route", "cause"),
            registry=registry,
        )
        self._draining = Gauge(
            f"{PREFIX}_draining", "1 after SIGTERM, until the process ends.", registry=registry
        )
        info = Gauge(
            f"{PREFIX}_build_info", "1, with the version.", ("version",), registry=registry
        )
        info.labels(version).set(1)
        ProcessCollector(registry=registry)
        for route in (*routes, *FURTHER_ROUTES):
            self._in_flight.labels(route)
            self._requests.labels(route, "200")
            for cause in CAUSES:
                self._failures.labels(route, cause)

    def begun(self, exchange: Exchange) -> None:
        """A request came."""
        self._in_flight.labels(exchange.route).inc()

    def ended(self, exchange: Exchange, now: float) -> None:
        """A request that had begun was answered, or its client is gone."""
        route = exchange.route
        self._in_flight.labels(route).dec()
        self._requests.labels(route, str(exchange.status)).inc()
        self._duration.labels(route).observe(now - exchange.started)
        if exchange.status == 200 and exchange.failure is not None:
            gone = exchange.failure == CLIENT_DISCONNECTED
            self._failures.labels(route, DISCONNECT if gone else ERROR).inc()
        if exchange.first_token is not None:
            self._first_token.labels(route).observe(exchange.first_token - exchange.started)
        for counter, tokens in (
            (self._prompt, exchange.prompt_tokens),
            (self._cached, exchange.cached_tokens),
            (self._completion, exchange.completion_tokens),
        ):
            if tokens is not None:
                counter.labels(route).inc(tokens)

    def drain_begun(self) -> None:
        self._draining.set(1)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the newest format that the Accept header names, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
