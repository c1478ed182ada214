"""Measures recovery times: workers killed beside warm replicas, brokers killed, workers that hang.

One fault at a time, with all workers ready before it; tests/chaos/large_storm.py has random
faults at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpool.bench import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from chaos.checker import TraceLine, detection, read
from chaos.harness import LIMITS, model
from chaos.storm import after_broker_deaths, percentiles, resumptions
from mlxpool.client import Client
from mlxpool.common.closing import Closing
from mlxpool.common.errors import PoolError
from mlxpool.common.trace import VARIABLE, History
from support.pool import Pool, until

HANGS = [(name, phase) for name in ("lock", "native", "gil") for phase in ("prefill", "decode")]
STEP_LIMIT = 1.5  # seconds, as in chaos.harness.LIMITS


class FaultBench(Closing):
    """A pool with endless streams, and the trace of all its processes."""

    def __init__(self, folder: Path, config: str) -> None:
        self.folder = folder / "history"
        self.folder.mkdir()
        os.environ[VARIABLE] = str(self.folder)
        self.pool = Pool(folder, LIMITS + config)
        self.history = History("chaos")
        self.closing = threading.Event()

    def __enter__(self) -> FaultBench:
        self.pool.start()
        self.client = self.pool.client(connect_timeout=60)
        return self

    def close(self) -> None:
        self.closing.set()
        self.client.close()
        self.pool.close()
        self.history.close()
        del os.environ[VARIABLE]

    def streams(self, number: int, tokens: int) -> None:
        """Keep `number` streams running until the bench is closed."""
        for each in range(number):
            threading.Thread(
                target=self._repeat, args=(self.client, each, tokens), daemon=True
            ).start()

    def _repeat(self, client: Client, number: int, tokens: int) -> None:
        turn = 0
        while not self.closing.is_set():
            turn += 1
            with contextlib.suppress(PoolError):
                client.generate("m", f"bench {number} {turn}", max_tokens=tokens, seed=turn)

    def wait_until_busy(self, replicas: int) -> None:
        """Wait until all replicas are ready and run a request."""

        def ready() -> bool:
            rows = self.pool.ask("ps")["workers"]
            busy = [row for row in rows if row["state"] == "ready" and row["running"]]
            return len(busy) == replicas

        until(ready, "all replicas are at work")

    def lines(self) -> Sequence[TraceLine]:
        return read(self.folder)


def kill_workers(count: int) -> dict[str, Any]:
    """Kill the workers of a model with three replicas, one after the other."""
    with tempfile.TemporaryDirectory() as name, FaultBench(Path(name), model(replicas=3)) as bench:
        bench.streams(9, 400)
        for number in range(count):
            bench.wait_until_busy(3)
            slot = f"m/{number % 3}"
            pid = int(bench.pool.worker(slot)["pid"])
            bench.history.write("killed", slot=slot)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
        lines = bench.lines()
        return {"acted on": detection(lines), "next token": resumptions(lines)}


def kill_brokers(count: int) -> dict[str, Any]:
    """Kill the broker and restart it at once."""
    with tempfile.TemporaryDirectory() as name, FaultBench(Path(name), model(replicas=1)) as bench:
        bench.streams(4, 4000)
        loads = []
        for _ in range(count):
            bench.wait_until_busy(1)
            time.sleep(0.3)
            bench.history.write("broker killed")
            bench.pool.kill()
            bench.pool.start()
            bench.wait_until_busy(1)
            loads.append(float(bench.pool.worker("m/0")["load_s"]))
        return {"next delta": after_broker_deaths(bench.lines()), "load": loads}


def hang(name: str, phase: str) -> dict[str, float]:
    """Seconds from the fault to the state SUSPECT and to the end of the worker."""
    config = model(fault=name, fault_in=phase, fault_at=3, fault_times=1)
    with tempfile.TemporaryDirectory() as folder, FaultBench(Path(folder), config) as bench:
        bench.streams(2, 30)
        until(lambda: _events(bench.lines(), "worker condemned"), "it is found")
        lines = bench.lines()
        began = min(line["t"] for line in lines if line["what"] == "fault")
        return {
            "suspect": _events(lines, "worker suspect")[0] - began,
            "ended": _events(lines, "worker condemned")[0] - began,
        }


def _events(lines: Sequence[TraceLine], name: str) -> list[float]:
    return [line["t"] for line in lines if line["what"] == "note" and line["event"] == name]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--brokers", type=int, default=20)
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    rows = list(_rows(given.kills, given.brokers))
    print(report.machine())
    print(report.table(("what", "figures"), rows))
    report.save(given.json, {"deaths": [list(row) for row in rows]})
    return 0


def _rows(kill_count: int, broker_count: int) -> Iterator[tuple[str, str]]:
    workers = kill_workers(kill_count)
    yield "worker killed, its death acted on, ms", _percentiles_text(workers["acted on"])
    yield "the next token, from a warm replica, ms", _percentiles_text(workers["next token"])
    broker = kill_brokers(broker_count)
    yield "broker killed and restarted, the next delta, ms", _percentiles_text(broker["next delta"])
    yield "the load in it, ms", _percentiles_text(broker["load"])
    for name, phase in HANGS:
        found = hang(name, phase)
        words = f"suspect after {found['suspect']:.2f} s, ended after {found['ended']:.2f} s"
        yield f"stuck ({name}) in {phase}, limit {STEP_LIMIT} s", words


def _percentiles_text(seconds: Sequence[float]) -> str:
    figures: Mapping[str, float] = percentiles(seconds)
    return json.dumps(figures)


if __name__ == "__main__":
    sys.exit(main())
