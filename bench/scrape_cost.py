"""Measures a scrape of /metrics with many models, and its effect on streams.

The first figures come from this process: the snapshot (the broker loop's part), the text, and the
same figures rendered by prometheus_client. The others come from a broker with as many models, each
of which has had a request, and 50 streams of 100 tokens a second, with and without a scraper.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import zmq
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric, UntypedMetricFamily
from prometheus_client.registry import Collector

from mlxpool.bench import report
from mlxpool.bench.broker import Cost, CountingClient, cost_of, ended
from mlxpool.bench.traffic.firehose import Flood, environment

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mlxpool.broker.core.core import Core
from mlxpool.broker.metrics.histograms import Frozen, Histogram
from mlxpool.broker.telemetry import snapshot
from mlxpool.broker.telemetry.metric_table import FAMILIES
from mlxpool.broker.telemetry.prometheus import PrometheusWriter
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.protocol import frames, from_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from support.pool import Pool
from support.snapshots import BROKER


def make_core(models: int, values: int = 200) -> Core:
    """A core whose models have histograms with log-normal values."""
    settings = {f"model-{n}": ModelConfig(path="builtin:counting") for n in range(models)}
    core, random = Core(PoolConfig(models=settings), 1), Random(1)
    for name in settings:
        figures = core.state.counters.of(name)
        figures.accepted = figures.outcomes["stop"] = values
        for histogram in vars(figures).values():
            if isinstance(histogram, Histogram):
                for _ in range(values):
                    histogram.observe(random.lognormvariate(-2, 2))
    return core


class PeerCollector(Collector):
    """Offers a snapshot to prometheus_client."""

    def __init__(self, taken: Snapshot) -> None:
        self.snapshot = taken

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            if family.kind == "histogram":
                yield self._histogram(family)
                continue
            plain = UntypedMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in family.rows(self.snapshot):
                assert not isinstance(value, Frozen)
                numbers = value if isinstance(value, Sequence) else (value,)
                for last, number in zip(family.last_label_values or (None,), numbers, strict=True):
                    plain.add_metric(labels if last is None else (*labels, last), number)
            yield plain

    def _histogram(self, family: Any) -> Metric:
        metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in family.rows(self.snapshot):
            ends = [*map(str, value.bounds), "+Inf"]
            metric.add_metric(
                labels, list(zip(ends, accumulate(value.counts), strict=True)), value.total
            )
        return metric


def replace_histograms(taken: Snapshot) -> Snapshot:
    """The snapshot with new histogram objects, so that a writer has none of their text cached."""
    models = tuple(
        replace(model, histograms={k: replace(v) for k, v in model.histograms.items()})
        for model in taken.models
    )
    return replace(taken, models=models)


def timed(work: Callable[[], Any], rounds: int) -> list[float]:
    """Milliseconds of each round, after a warm-up."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return times


def costs(models: int, rounds: int) -> list[tuple[str, str]]:
    core, writer = make_core(models), PrometheusWriter()
    taken = snapshot.take(core.state, BROKER, 0.0, 1.0)
    registry = CollectorRegistry()
    registry.register(PeerCollector(taken))
    body = writer.text(taken)
    changed = [replace_histograms(taken) for _ in range(rounds + 1)]
    rows = [
        ("the loop's part, ms", timed(lambda: snapshot.take(core.state, BROKER, 0.0, 1.0), rounds)),
        ("the text, every histogram new, ms", timed(lambda: writer.text(changed.pop()), rounds)),
        ("the text, nothing new, ms", timed(lambda: writer.text(taken), rounds)),
        (
            "prometheus_client's text of the same, ms",
            timed(lambda: generate_latest(registry), rounds),
        ),
    ]
    kilobytes = f"{len(body) / 1000:.0f}"
    return [(f"{models} models: size of the answer, kB", kilobytes)] + [
        (f"{models} models: {name}", report.spread(times, 2)) for name, times in rows
    ]


# The client of this bench sends no pings, so the limits are longer than a round.
CONFIG = """\
[pool]
beat_limit = 1000
client_grace = 1000
memory_limit = "1GB"
metrics = "127.0.0.1:0"

[models.m]
path = "builtin:counting"
sequences = 4096
memory_limit = "600MB"
"""
OTHER = '\n[models.model-{n}]\npath = "builtin:counting"\nmemory_limit = "600MB"\n'


@contextmanager
def pool(flood: Flood, models: int, folder: Path) -> Iterator[Pool]:
    """A pool with a firehose worker, and more models than its memory allows to start."""
    config = CONFIG + "".join(OTHER.format(n=n) for n in range(models - 3))
    with Pool(folder, config, environment=environment(folder, flood)) as running:
        yield running


SCRAPER = """\
import sys, time, urllib.request

url, pause = sys.argv[1], float(sys.argv[2])
while True:
    time.sleep(pause)
    start = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        answer.read()
    print((time.perf_counter() - start) * 1000, flush=True)
"""


class Scraper:
    """A process that reads /metrics every `pause` seconds until it is stopped."""

    def __init__(self, url: str, pause: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRAPER, f"{url}/metrics", str(pause)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def stop(self) -> list[float]:
        """End the process; the times of all scrapes in ms."""
        self.process.terminate()
        output, _ = self.process.communicate()
        return [float(line) for line in output.split("\n")[:-1]]


def stream(flood: Flood, models: int, pause: float) -> tuple[Cost, list[float]]:
    """One round: its cost, and the times of all scrapes in ms. `pause` 0: no scraper."""
    with tempfile.TemporaryDirectory() as name, pool(flood, models, Path(name)) as running:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        counter = CountingClient(context, sockets.ipc(running.run_dir, "front"))
        counter.ask(flood.streams, flood.tokens, batch=True)
        ask_others(counter, models)
        url = running.ask("ps")["broker"]["metrics"]
        scraper = Scraper(url, pause) if pause else None
        assert running.process is not None
        # The requests to the other models end as well, without a worker.
        finished = partial(ended, [counter], flood.streams + models - 3)
        cost = cost_of([counter], finished, running.process.pid, delays=True)
        times = scraper.stop() if scraper is not None else []
        counter.socket.close(linger=0)
        context.term()
        return cost, times


def ask_others(counter: CountingClient, models: int) -> None:
    """Send one request to each other model, so that it has all its series."""
    for number in range(models - 3):
        body = {"model": f"model-{number}", "prompt": "x", "queue_ms": 100}
        header = Header(from_client.Generate.kind, os.urandom(16), 0, 1)
        counter.socket.send_multipart(frames.encode(header, body))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=int, default=50)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    options.add_argument("--pause", type=float, default=1.0, help="seconds between two scrapes")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    rows = costs(given.models, 50)
    flood = Flood(streams=50, rows=50, tokens=int(100 * given.seconds), rate=100)
    quiet, scraped, times = [], [], []
    for _ in range(given.rounds):
        quiet.append(stream(flood, given.models, 0.0)[0].delay(0.99))
        cost, took = stream(flood, given.models, given.pause)
        scraped.append(cost.delay(0.99))
        times += took
    rows += [
        (
            f"{given.models} models: a scrape over HTTP beside 50 streams, ms",
            report.spread(times, 2),
        ),
        ("50 streams x 100 tokens/s, nobody scrapes: p99 ms", report.spread(quiet, 2)),
        (f"the same, a scrape every {given.pause:g} s: p99 ms", report.spread(scraped, 2)),
    ]
    print(report.machine())
    print(report.versions())
    print(report.table(("what", "median (min - max)"), rows))
    report.save(given.json, {"scrape": [list(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
