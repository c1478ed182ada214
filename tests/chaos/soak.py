"""Runs streams for half an hour, with a fault a minute, to find growth of memory or descriptors.

The broker's memory, descriptors, threads and the sizes of its maps are sampled every ten seconds.
The growth over the second half is printed, because caches fill in the first half. After the end of
all streams the maps must be empty.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from chaos.storm import WEIGHTS, Plan, Storm
from mlxpool.bench import report
from support.pool import until

SAMPLE_INTERVAL = 10.0  # seconds
READER_PAUSE = 3.0  # seconds between two streams of a reader; speed is not measured


class Soak(Storm):
    """A storm whose readers start streams until the time is over."""

    def __init__(self, plan: Plan, folder: Path, minutes: float) -> None:
        super().__init__(plan, folder)
        self.end_at = time.monotonic() + minutes * 60
        self.samples: list[dict[str, Any]] = []

    def run_streams_and_faults(self, relay: Any) -> None:
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        super().run_streams_and_faults(relay)
        self.idle = self._idle()

    def _reader(self, client: Any) -> None:
        while time.monotonic() < self.end_at:
            self._stream(client, next(self.numbers))
            time.sleep(READER_PAUSE)

    def _sample(self) -> None:
        while not self.finished.wait(SAMPLE_INTERVAL):
            process = self.pool.process
            if process is None:
                continue
            try:
                broker = psutil.Process(process.pid)
                self.samples.append(
                    {
                        "pid": process.pid,
                        "rss": broker.memory_info().rss,
                        "descriptors": broker.num_fds(),
                        "threads": broker.num_threads(),
                        **self.pool.ask("stats")["sizes"],
                    }
                )
            except Exception:  # no broker is running
                continue

    def _idle(self) -> Mapping[str, int]:
        """Returns the sizes of the broker's maps after the end of all requests."""

        def empty() -> bool:
            sizes = self.pool.ask("stats")["sizes"]
            return not any(sizes[name] for name in ("requests", "asked", "places"))

        until(empty, "the broker is idle")
        return dict(self.pool.ask("stats")["sizes"])


def growth(samples: Sequence[Mapping[str, Any]], name: str) -> str:
    """Returns, as text, a value's growth from the third to the fourth quarter of the samples.

    Compares the medians of both quarters, for samples of the last broker only.
    """
    own = [s for s in samples if s["pid"] == samples[-1]["pid"]]
    half = own[len(own) // 2 :]
    early, late = half[: len(half) // 2], half[len(half) // 2 :]
    before, after = (statistics.median(s[name] for s in part) for part in (early, late))
    return f"{before:.0f} -> {after:.0f} ({(after - before) / max(1, before):+.1%})"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--pause", type=float, default=60, help="mean seconds between two faults")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    WEIGHTS["broker"] = 0  # no fault ends the broker, whose growth is measured
    plan = Plan(streams=0, faults=10**6, at_once=6, replicas=2, tokens=200, pause=given.pause)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(plan, Path(folder), given.minutes)
        outcome = soak.run()
    names = [name for name in soak.samples[-1] if name != "pid"]
    rows = [(name, growth(soak.samples, name)) for name in names]
    rows += [(key, str(value)) for key, value in outcome.figures.items()]
    rows.append(("sizes when idle", str(soak.idle)))
    print(report.machine())
    print(report.table(("what", f"{given.minutes:g} minutes"), rows))
    report.save(given.json, {"soak": dict(rows)})
    return 0 if outcome.findings.sound else 1


if __name__ == "__main__":
    sys.exit(main())
