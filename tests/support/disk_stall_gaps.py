"""Measures how a stalled disk of the job store affects streams that are not jobs.

PYTHONPATH=tests python tests/support/disk_stall_gaps.py [--rounds 3] [--seconds 5]

Eight streams run while jobs run and are submitted. In each round the disk works for `seconds` and
then stalls for `seconds`. The client measures each gap between two deltas of a stream.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mlxpool.client import Client
from mlxpool.common.errors import PoolError
from support.disk_shim import ShimmedDisk
from support.pool import Pool

CONFIG = """
[models.m]
path = "builtin:counting"
sequences = 16
counting.step_us = 20000
"""
STREAMS, JOBS = 8, 4


class Phases:
    """The gaps measured in each phase; a gap belongs to the phase in which it ends."""

    def __init__(self) -> None:
        self.now = ""
        self.gaps: dict[str, list[float]] = {"works": [], "stalls": []}

    def note(self, gap: float) -> None:
        if self.now:
            self.gaps[self.now].append(gap)


def read(client: Client, number: int, phases: Phases, over: threading.Event) -> None:
    """Reads streams, one after the other, until `over` is set."""
    while not over.is_set():
        last = 0.0
        with client.stream("m", f"stream {number}", max_tokens=100_000) as stream:
            for _ in stream:
                now = time.perf_counter()
                if last:
                    phases.note(now - last)
                last = now
                if over.is_set():
                    break


def submit(client: Client, over: threading.Event) -> None:
    """Submits jobs one after the other; a job waits while the disk stalls."""
    while not over.is_set():
        try:
            client.submit("m", "a job", max_tokens=50)
        except PoolError:
            pass
        over.wait(0.1)


def percentile(gaps: Sequence[float], share: float) -> float:
    return sorted(gaps)[min(len(gaps) - 1, int(share * len(gaps)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    phases, over = Phases(), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "disk"
        with ShimmedDisk(root) as disk:
            state = ("--state-dir", str(root / "jobs"))
            pool = Pool(Path(folder), CONFIG, arguments=state, environment=disk.environment)
            with pool, pool.client() as client, pool.client() as jobs:
                for number in range(JOBS):
                    jobs.submit("m", f"job {number}", max_tokens=100_000)
                threads = [
                    threading.Thread(target=read, args=(client, number, phases, over))
                    for number in range(STREAMS)
                ]
                threads.append(threading.Thread(target=submit, args=(jobs, over)))
                for thread in threads:
                    thread.start()
                time.sleep(2.0)
                for _ in range(options.rounds):
                    for phase in phases.gaps:
                        disk.stall(phase == "stalls")
                        phases.now = phase
                        time.sleep(options.seconds)
                    disk.stall(False)
                    phases.now = ""
                    time.sleep(1.0)
                over.set()
                for thread in threads:
                    thread.join()
    p99 = {phase: percentile(gaps, 0.99) for phase, gaps in phases.gaps.items()}
    for phase, gaps in phases.gaps.items():
        half, most = percentile(gaps, 0.5), max(gaps)
        print(
            f"the disk {phase}: {len(gaps)} gaps, median {1000 * half:.1f} ms,"
            f" p99 {1000 * p99[phase]:.1f} ms, longest {1000 * most:.1f} ms"
        )
    print(f"p99, stalls to works: {p99['stalls'] / p99['works']:.2f}")


if __name__ == "__main__":
    main()
