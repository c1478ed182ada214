"""Computes the figures of a load from its requests, under their usual names.

TTFT: time to first token, from the time when the request was due. ITL: inter-token latency, between
two pieces of a stream. TPOT: mean time of a request per output token after the first. E2EL:
end-to-end latency, from the time when the request was due to its last token.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from mlxpool.bench.measurement import percentile


class Sample(Struct, frozen=True):
    """A request as its client saw it. Times are seconds after the start of the load."""

    due: float
    sent: float
    times: Sequence[float]  # arrival of each piece of the answer; a piece has one or more tokens
    prompt_tokens: int
    output_tokens: int
    error: str = ""  # why the request failed
    exact: bool = True  # False: tokens were not reported, and each piece counts as one token
    counts: Sequence[int] = ()  # tokens of each piece
    ids: Sequence[int] = ()  # ids of the answer; only from a pool

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.due

    @property
    def tpot(self) -> float:
        """The seconds per output token after the first token; 0 for an answer of a single token."""
        return (self.times[-1] - self.times[0]) / max(1, self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Slo(Struct, frozen=True):
    """Service level objectives of a request, in milliseconds. 0 means no objective.

    `itl` bounds every gap of the request.
    """

    ttft: float = 0.0
    tpot: float = 0.0
    itl: float = 0.0
    e2el: float = 0.0

    def given(self) -> dict[str, float]:
        """Returns the objectives that are not 0."""
        objectives = {"ttft": self.ttft, "tpot": self.tpot, "itl": self.itl, "e2el": self.e2el}
        return {name: bound for name, bound in objectives.items() if bound}

    def met_by(self, sample: Sample) -> bool:
        """Returns whether the request meets every objective."""
        had = {
            "ttft": sample.ttft,
            "tpot": sample.tpot,
            "itl": max(sample.itl, default=0.0),
            "e2el": sample.e2el,
        }
        return all(1000 * had[name] <= bound for name, bound in self.given().items())


class Metric(Struct, frozen=True):
    """A metric of the report. `compared`: whether ratios of contestants have a meaning."""

    name: str
    unit: str
    less_is_better: bool = False
    digits: int = 1
    compared: bool = True


STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "p99": lambda values: percentile(values, 99),
    "max": max,
}
SHOWN: Mapping[str, Sequence[str]] = {
    "TTFT": ("mean", "median", "p99"),
    "TPOT": ("mean", "median", "p99"),
    "ITL": ("mean", "median", "p99", "max"),
    "E2EL": ("mean", "median", "p99"),
}


def summarise(samples: Sequence[Sample], slo: Slo) -> dict[Metric, float]:
    """Returns the figures of a load; times are milliseconds. Failed requests are only counted.

    Raises ValueError if every request failed.
    """
    done = [sample for sample in samples if not sample.error]
    if not done:
        raise ValueError(f"no request was answered: {errors(samples)}")
    seconds = max(sample.times[-1] for sample in done) - min(sample.due for sample in samples)
    output = sum(sample.output_tokens for sample in done)
    prompts = sum(sample.prompt_tokens for sample in done)
    figures = {
        Metric("request throughput", "requests/s", digits=2): len(done) / seconds,
        Metric("output token throughput", "tokens/s"): output / seconds,
        Metric("total token throughput", "tokens/s"): (prompts + output) / seconds,
    }
    if slo.given():
        good = sum(map(slo.met_by, done))
        figures[Metric("goodput", "requests/s", digits=2)] = good / seconds
    latencies = {
        "TTFT": [sample.ttft for sample in done],
        "TPOT": [sample.tpot for sample in done if sample.output_tokens > 1],
        "ITL": [gap for sample in done for gap in sample.itl],
        "E2EL": [sample.e2el for sample in done],
    }
    for name, values in latencies.items():
        for statistic in SHOWN[name] if values else ():
            metric = Metric(f"{name} {statistic}", "ms", less_is_better=True)
            figures[metric] = 1000 * STATISTICS[statistic](values)
    late = [sample.sent - sample.due for sample in samples]
    for statistic in ("median", "p99", "max"):
        metric = Metric(f"sender late, {statistic}", "ms", less_is_better=True, compared=False)
        figures[metric] = 1000 * STATISTICS[statistic](late)
    failed = Metric("failed requests", "", less_is_better=True, digits=0, compared=False)
    figures[failed] = len(samples) - len(done)
    return figures


def errors(samples: Sequence[Sample]) -> str:
    """Returns the names of errors, each with its number of requests; "" if no request failed."""
    counts = Counter(sample.error for sample in samples if sample.error)
    return ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())


def tokens_per_piece(samples: Sequence[Sample]) -> float:
    """Returns the mean number of output tokens in a piece of an answer; 0 if no piece came."""
    done = [sample for sample in samples if not sample.error]
    pieces = sum(len(sample.times) for sample in done)
    return sum(sample.output_tokens for sample in done) / pieces if pieces else 0.0
