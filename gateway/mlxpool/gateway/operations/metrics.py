"""The gateway's metrics, in the text formats of Prometheus.

Labels have few values, known beforehand: routes of the table and statuses. Paths, keys, ids and
models that a client named are not labels. The broker's own metrics have the figures of each model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial

from mlxpool.common.metrics import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    PROCESS,
    Family,
    Histogram,
    MetricsWriter,
    Rows,
)
from mlxpool.gateway.operations.exchange import CLIENT_DISCONNECTED, FURTHER_ROUTES, Exchange

# Upper bounds in seconds, equal to the bounds of the broker's histograms of these times.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
DURATION_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
PREFIX = "mlxpool_gateway"
CAUSES = ERROR, DISCONNECT = "error", "disconnect"  # causes of an early end of a stream

Counts = Counter[tuple[str, ...]]  # by the values of the labels
Histograms = defaultdict[tuple[str, ...], Histogram]  # by the values of the labels


class Metrics:
    """The metrics. Only the event loop's thread uses them."""

    def __init__(self, version: str, routes: Iterable[str]) -> None:
        """`routes`: all routes that are counted.

        The series of these routes begin at 0, so that rates are right.
        """
        routes = (*routes, *FURTHER_ROUTES)
        self.version = version
        self.draining = False
        self.requests: Counts = Counter({(route, "200"): 0 for route in routes})
        self.in_flight: Counts = Counter({(route,): 0 for route in routes})
        self.failures: Counts = Counter({(route, cause): 0 for route in routes for cause in CAUSES})
        self.prompt_tokens: Counts = Counter()
        self.cached_tokens: Counts = Counter()
        self.completion_tokens: Counts = Counter()
        self.durations: Histograms = defaultdict(partial(Histogram, DURATION_BUCKETS))
        self.first_tokens: Histograms = defaultdict(partial(Histogram, FIRST_TOKEN_BUCKETS))
        self._writer = MetricsWriter(FAMILIES)

    def begun(self, exchange: Exchange) -> None:
        """Counts a request that begins."""
        self.in_flight[exchange.route,] += 1

    def ended(self, exchange: Exchange, now: float) -> None:
        """Counts a request that was answered, or whose client is gone."""
        route = (exchange.route,)
        self.in_flight[route] -= 1
        self.requests[exchange.route, str(exchange.status)] += 1
        self.durations[route].observe(now - exchange.started)
        if exchange.status == 200 and exchange.failure is not None:
            gone = exchange.failure == CLIENT_DISCONNECTED
            self.failures[exchange.route, DISCONNECT if gone else ERROR] += 1
        if exchange.first_token is not None:
            self.first_tokens[route].observe(exchange.first_token - exchange.started)
        for counts, tokens in (
            (self.prompt_tokens, exchange.prompt_tokens),
            (self.cached_tokens, exchange.cached_tokens),
            (self.completion_tokens, exchange.completion_tokens),
        ):
            if tokens is not None:
                counts[route] += tokens

    def drain_begun(self) -> None:
        self.draining = True

    def text(self, accept: str) -> tuple[bytes, str]:
        """Returns all metrics in the newest format that `accept` allows, and the content type.

        `accept`: the header Accept.
        """
        return self._writer.text(self, accept)


def _frozen(histograms: Histograms) -> Rows:
    return [(labels, histogram.frozen()) for labels, histogram in histograms.items()]


FAMILIES = (
    Family(f"{PREFIX}_requests_total", COUNTER, "Answered requests.",
           ("route", "status"), lambda metrics: metrics.requests.items()),
    Family(f"{PREFIX}_requests_in_flight", GAUGE, "Requests that are being answered.",
           ("route",), lambda metrics: metrics.in_flight.items()),
    Family(f"{PREFIX}_request_duration_seconds", HISTOGRAM,
           "Time from a request's headers to the end of its response.",
           ("route",), lambda metrics: _frozen(metrics.durations)),
    Family(f"{PREFIX}_time_to_first_token_seconds", HISTOGRAM,
           "Time from a request's headers to its first token.",
           ("route",), lambda metrics: _frozen(metrics.first_tokens)),
    Family(f"{PREFIX}_prompt_tokens_total", COUNTER, "Prompt tokens of answered requests.",
           ("route",), lambda metrics: metrics.prompt_tokens.items()),
    Family(f"{PREFIX}_cached_tokens_total", COUNTER,
           "Prompt tokens that were found in the prefix cache.",
           ("route",), lambda metrics: metrics.cached_tokens.items()),
    Family(f"{PREFIX}_generation_tokens_total", COUNTER, "Tokens that were generated.",
           ("route",), lambda metrics: metrics.completion_tokens.items()),
    Family(f"{PREFIX}_stream_failures_total", COUNTER,
           "Responses with the status 200 that ended with an error, or whose client was gone.",
           ("route", "cause"), lambda metrics: metrics.failures.items()),
    Family(f"{PREFIX}_draining", GAUGE, "1 after SIGTERM, until the process ends.",
           (), lambda metrics: [((), int(metrics.draining))]),
    Family(f"{PREFIX}_build_info", GAUGE, "Version of the gateway; always 1.",
           ("version",), lambda metrics: [((metrics.version,), 1)]),
    *PROCESS,
)  # fmt: skip
