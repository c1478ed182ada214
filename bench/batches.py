"""Measures a batch of many lines against the same requests as streams, in pairs.

    python bench/batches.py [--lines 50000] [--tokens 32] [--step-us 2000] [--sequences 64]
                            [--model counting|demo] [--rounds 3] [--json FILE]

Each round runs both sides in turn in a pool of its own. The streams are those of one client for
asyncio, which has so many open at a time that no place is ever free, and reads every id. The batch
is sent as a file, followed, and its results are read. A side's time is from the first byte that is
sent to the last result; the ids of both are compared. The broker's memory is the peak of its
resident set, from the start of the broker to the end of the side. Processor time is that of the
broker, and that of this process, which is the client; other programs on the machine change it less
than they change the rates.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.client import AsyncClient, Client

SETTINGS = """
[pool]
state_dir = "{folder}/jobs"
state_bytes = "8 GB"
[models.bench]
{model}
sequences = {sequences}
"""
COUNTING = 'path = "builtin:counting"\ncounting.step_us = {step_us}'


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a round took. Memory is MB, processor time seconds."""

    seconds: float
    tokens: int
    memory: float
    digest: str
    broker_cpu: float
    client_cpu: float
    sent: float = 0.0  # seconds until the batch was accepted
    worked: float = 0.0  # seconds until it had ended

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prompts(count: int) -> list[str]:
    return [f"Line {number} of the batch says" for number in range(count)]


def digest_of(results: Iterable[Iterable[int]]) -> str:
    """One digest of the ids of all results in their order."""
    whole = hashlib.sha256()
    for ids in results:
        whole.update(json.dumps(list(ids)).encode())
    return whole.hexdigest()


def peak_memory(pid: int) -> float:
    """MB of a process at its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    raise SystemExit(f"no VmHWM of {pid}")


async def _streams(run_dir: Path, texts: list[str], options: dict[str, Any], open_at: int) -> Any:
    results: list[tuple[int, ...]] = [()] * len(texts)
    numbers = iter(range(len(texts)))

    async with AsyncClient(run_dir) as client:

        async def work() -> None:
            for number in numbers:
                options_of = {**options, "seed": number}
                results[number] = (await client.generate("bench", texts[number], **options_of)).ids

        await asyncio.gather(*(work() for _ in range(open_at)))
    return results


def as_streams(run_dir: Path, texts: list[str], options: dict[str, Any], open_at: int) -> Any:
    started = time.perf_counter()
    results = asyncio.run(_streams(run_dir, texts, options, open_at))
    return time.perf_counter() - started, results, 0.0, 0.0


def as_batch(run_dir: Path, texts: list[str], options: dict[str, Any], open_at: int) -> Any:
    path = run_dir / "lines.jsonl"
    with path.open("w") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"prompt": text, "options": {"seed": number}}) + "\n")
    started = time.perf_counter()
    with Client(run_dir) as client:
        batch = client.submit_batch(path, "bench", **options)
        sent = time.perf_counter() - started
        for row in batch.progress():
            if sys.stdout.isatty():
                print(f"  {row['done']} of {row['lines']}", end="\r", flush=True)
        worked = time.perf_counter() - started
        results = []
        for result in batch.results():
            if result.result is None:
                raise SystemExit(f"line {result.line} has no result: {result.error}")
            results.append(result.result.ids)
    return time.perf_counter() - started, results, sent, worked


def measured(side: Callable[..., Any], given: argparse.Namespace) -> Side:
    """Run one side in a pool of its own."""
    model = (
        COUNTING.format(step_us=given.step_us)
        if given.model == "counting"
        else ('path = "builtin:demo"')
    )
    texts, options = prompts(given.lines), {"max_tokens": given.tokens}
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        settings = SETTINGS.format(folder=folder, model=model, sequences=given.sequences)
        with serving(run_dir, settings) as broker, Client(run_dir) as client:
            client.generate("bench", "warm", max_tokens=2)
            process, own = psutil.Process(broker.pid), time.process_time()
            before = sum(process.cpu_times()[:2])
            seconds, results, sent, worked = side(run_dir, texts, options, 2 * given.sequences)
            broker_cpu = sum(process.cpu_times()[:2]) - before
            client_cpu = time.process_time() - own
            memory = peak_memory(broker.pid)
    tokens = sum(map(len, results))
    digest = digest_of(results)
    return Side(seconds, tokens, memory, digest, broker_cpu, client_cpu, sent, worked)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lines", type=int, default=50_000)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--step-us", type=int, default=2000)
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--model", choices=("counting", "demo"), default="counting")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    pairs: list[tuple[Side, Side]] = []
    for number in range(given.rounds):
        order = [as_streams, as_batch] if number % 2 == 0 else [as_batch, as_streams]
        load = os.getloadavg()[0]
        found = {side: measured(side, given) for side in order}
        streams, batch = found[as_streams], found[as_batch]
        if streams.digest != batch.digest:
            raise SystemExit("the ids of the batch are not those of the streams")
        pairs.append((streams, batch))
        print(
            f"round {number + 1}: streams {streams.rate:,.0f} tokens/s, batch {batch.rate:,.0f},"
            f" ratio {batch.rate / streams.rate:.3f}; sent in {batch.sent:.1f} s, worked off after"
            f" {batch.worked:.1f} s, read after {batch.seconds:.1f} s; broker"
            f" {streams.memory:.0f} / {batch.memory:.0f} MB; processor time of the broker"
            f" {streams.broker_cpu:.1f} / {batch.broker_cpu:.1f} s, of the client"
            f" {streams.client_cpu:.1f} / {batch.client_cpu:.1f} s; load before {load:.1f}",
            flush=True,
        )
    figures = {
        "lines": given.lines,
        "tokens": given.tokens,
        "streams tokens/s": statistics.median(streams.rate for streams, _ in pairs),
        "batch tokens/s": statistics.median(batch.rate for _, batch in pairs),
        "ratio": statistics.median(batch.rate / streams.rate for streams, batch in pairs),
        "broker s with streams": statistics.median(streams.broker_cpu for streams, _ in pairs),
        "broker s with the batch": statistics.median(batch.broker_cpu for _, batch in pairs),
        "client s with streams": statistics.median(streams.client_cpu for streams, _ in pairs),
        "client s with the batch": statistics.median(batch.client_cpu for _, batch in pairs),
        "broker MB with streams": max(streams.memory for streams, _ in pairs),
        "broker MB with the batch": max(batch.memory for _, batch in pairs),
    }
    print(report.machine())
    print(
        report.table(("what", given.model), [(key, str(value)) for key, value in figures.items()])
    )
    report.save(given.json, {"batches": figures})


if __name__ == "__main__":
    main()
