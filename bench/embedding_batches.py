"""Measures a batch of embed lines against the same texts asked one by one, in pairs.

    python bench/embedding_batches.py [--lines 5000] [--model builtin:demo-embed] [--open 64]
                                      [--rounds 3] [--json FILE]

Each round runs both sides in turn in a pool of its own. The calls are those of one client for
asyncio, with a text each and `--open` of them open at a time. The batch is sent as a file,
followed, and its results are read. A side's time is from the first byte that is sent to the last
vector; the vectors of both are compared. The broker's memory is the peak of its resident set, from
its start to the end of the side; processor time is that of the broker and of this process, which
is the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.client import AsyncClient, Client

SETTINGS = """
[pool]
state_dir = "{folder}/jobs"
state_bytes = "8 GB"
[models.bench]
path = "{model}"
"""
FAR = 1e-4  # between two vectors of one text: they were computed beside different others

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a round took. Memory is MB, processor time seconds."""

    seconds: float
    rows: Rows
    memory: float
    broker_cpu: float
    client_cpu: float
    stored: float  # MB in the folder of jobs
    sent: float = 0.0  # seconds until the batch was accepted
    worked: float = 0.0  # seconds until it had ended

    @property
    def rate(self) -> float:
        return len(self.rows) / self.seconds


def texts_of(count: int) -> list[str]:
    return [f"read line {number} of the file and return its words" for number in range(count)]


def peak_memory(pid: int) -> float:
    """MB of a process at its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    raise SystemExit(f"no VmHWM of {pid}")


async def _calls(run_dir: Path, texts: list[str], open_at: int) -> list[Any]:
    found: list[Any] = [None] * len(texts)
    numbers = iter(range(len(texts)))
    async with AsyncClient(run_dir) as client:

        async def work() -> None:
            for number in numbers:
                found[number] = np.asarray(await client.embed("bench", texts[number]))

        await asyncio.gather(*(work() for _ in range(open_at)))
    return found


def as_calls(
    run_dir: Path, texts: list[str], open_at: int
) -> tuple[float, list[Any], float, float]:
    started = time.perf_counter()
    found = asyncio.run(_calls(run_dir, texts, open_at))
    return time.perf_counter() - started, found, 0.0, 0.0


def as_batch(
    run_dir: Path, texts: list[str], open_at: int
) -> tuple[float, list[Any], float, float]:
    path = run_dir / "lines.jsonl"
    with path.open("w") as file:
        for text in texts:
            file.write(json.dumps({"kind": "embed", "inputs": text}) + "\n")
    started = time.perf_counter()
    with Client(run_dir) as client:
        batch = client.submit_batch(path, "bench")
        sent = time.perf_counter() - started
        for row in batch.progress():
            print(f"  {row['done']} of {row['lines']}", end="\r", flush=True)
        worked = time.perf_counter() - started
        found = []
        for result in batch.results(wait=False):
            if result.vectors is None:
                raise SystemExit(f"line {result.line} has no vector: {result.error}")
            found.append(np.asarray(result.vectors))
    return time.perf_counter() - started, found, sent, worked


def measured(side: Callable[..., Any], given: argparse.Namespace) -> Side:
    """Run one side in a pool of its own."""
    texts = texts_of(given.lines)
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        settings = SETTINGS.format(folder=folder, model=given.model)
        with serving(run_dir, settings) as broker, Client(run_dir) as client:
            client.embed("bench", "warm")
            process, own = psutil.Process(broker.pid), time.process_time()
            before = sum(process.cpu_times()[:2])
            seconds, found, sent, worked = side(run_dir, texts, given.open)
            broker_cpu = sum(process.cpu_times()[:2]) - before
            client_cpu = time.process_time() - own
            memory = peak_memory(broker.pid)
            files = (run_dir / "jobs").rglob("*")
            stored = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    rows = np.concatenate(found)
    return Side(seconds, rows, memory, broker_cpu, client_cpu, stored, sent, worked)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lines", type=int, default=5000)
    options.add_argument("--model", default="builtin:demo-embed", help="also a folder")
    options.add_argument("--open", type=int, default=64, help="calls that are open at a time")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--batch-only", action="store_true", help="measure the batch alone")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    pairs: list[tuple[Side, Side]] = []
    for number in range(given.rounds):
        order = [as_calls, as_batch] if number % 2 == 0 else [as_batch, as_calls]
        order = [as_batch] if given.batch_only else order
        load = os.getloadavg()[0]
        found = {side: measured(side, given) for side in order}
        batch = found[as_batch]
        calls = found.get(as_calls, batch)
        if (far := float(np.abs(calls.rows - batch.rows).max())) > FAR:
            raise SystemExit(f"the vectors of the batch differ from those of the calls by {far}")
        pairs.append((calls, batch))
        print(
            f"round {number + 1}: calls {calls.rate:,.0f} texts/s, batch {batch.rate:,.0f}, ratio"
            f" {batch.rate / calls.rate:.3f}; sent in {batch.sent:.1f} s, worked off after"
            f" {batch.worked:.1f} s, read after {batch.seconds:.1f} s; broker"
            f" {calls.memory:.0f} / {batch.memory:.0f} MB; processor time of the broker"
            f" {calls.broker_cpu:.1f} / {batch.broker_cpu:.1f} s, of the client"
            f" {calls.client_cpu:.1f} / {batch.client_cpu:.1f} s; {batch.stored:.0f} MB stored;"
            f" {batch.rows.shape[1]} numbers a vector; load before {load:.1f}",
            flush=True,
        )
    figures = {
        "lines": given.lines,
        "numbers of a vector": pairs[0][1].rows.shape[1],
        "calls texts/s": statistics.median(calls.rate for calls, _ in pairs),
        "batch texts/s": statistics.median(batch.rate for _, batch in pairs),
        "ratio": statistics.median(batch.rate / calls.rate for calls, batch in pairs),
        "broker s with calls": statistics.median(calls.broker_cpu for calls, _ in pairs),
        "broker s with the batch": statistics.median(batch.broker_cpu for _, batch in pairs),
        "broker MB with calls": max(calls.memory for calls, _ in pairs),
        "broker MB with the batch": max(batch.memory for _, batch in pairs),
        "MB stored": max(batch.stored for _, batch in pairs),
    }
    print(report.machine())
    print(report.table(("what", given.model), [(key, str(one)) for key, one in figures.items()]))
    report.save(given.json, {"embedding batches": figures})


if __name__ == "__main__":
    main()
