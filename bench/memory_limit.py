"""Checks that a worker keeps its memory limit under more requests than fit into it.

    python bench/memory_limit.py [--requests 2000] [--limit 190] [--json FILE]

A broker, one worker with the embedded model, and one client with more open requests than the worker
has slots. Rows outgrow the memory and are preempted, the prefix cache is evicted. The worker's
resident bytes are sampled every 20 ms, its high-water mark comes from the kernel, and the
allocator's peak from the worker's report. Exits with 1 if the limit was exceeded, a request failed,
or there were too few preemptions and evictions for a conclusion.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mlxpool.bench import report
from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.pool import Pool

OPEN_REQUESTS = 24  # of which `sequences` run
SAMPLE_INTERVAL = 0.02  # seconds
# The level of memory is that of requests EARLY to 2 * EARLY, and of the last LATE requests.
EARLY, LATE = 200, 200
CONFIG = """
[models.m]
path = "builtin:demo"
memory_limit = {limit}
sequences = 8
"""
MIB = 2**20
MIN_COUNTS = {"preemptions": 100, "evictions": 100}
MAX_GROWTH = 0.02  # of the level, as a share


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and the number of tokens to generate."""

    prompt: tuple[int, ...]
    tokens: int


def jobs_of(count: int, vocabulary: int = 4096) -> list[Job]:
    """Lengths as in chats: most short, some long; half share a prefix with an earlier one."""
    rng = np.random.default_rng(0)
    jobs: list[Job] = []
    for _ in range(count):
        size = int(min(1500, 20 + rng.exponential(150)))
        ids = tuple(rng.integers(1, vocabulary, size).tolist())
        if jobs and rng.random() < 0.5:
            earlier = jobs[int(rng.integers(max(0, len(jobs) - 50), len(jobs)))].prompt
            ids = (*earlier, *ids[:50])[:1500]
        tokens = 300 + rng.integers(300) if rng.random() < 0.2 else 4 + rng.exponential(40)
        jobs.append(Job(ids, int(tokens)))
    return jobs


@dataclass(slots=True)
class Observations:
    """`rss`: (finished requests, resident bytes of the worker); `ends`: requests by outcome."""

    done: int = 0
    rss: list[tuple[int, int]] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


async def sample_memory(pid: int, seen: Observations) -> None:
    process = psutil.Process(pid)
    while True:
        seen.rss.append((seen.done, process.memory_info().rss))
        await asyncio.sleep(SAMPLE_INTERVAL)


async def ask(client: AsyncClient, todo: list[Job], seen: Observations) -> None:
    """Send one request after the other until none is left."""
    while todo:
        job = todo.pop()
        try:
            result = await client.generate(
                "m", tokens=job.prompt, max_tokens=job.tokens, ignore_eos=True, seed=seen.done
            )
            seen.ends[result.reason if len(result.ids) == job.tokens else "short"] += 1
        except PoolError as error:
            seen.ends[error.code] += 1
        seen.done += 1


async def load(run_dir: Path, pid: int, jobs: Sequence[Job]) -> Observations:
    seen = Observations()
    client = AsyncClient(run_dir)
    sampler = asyncio.create_task(sample_memory(pid, seen))
    todo = list(reversed(jobs))
    await asyncio.gather(*(ask(client, todo, seen) for _ in range(OPEN_REQUESTS)))
    sampler.cancel()
    await client.close()
    return seen


def high_water(pid: int) -> int:
    """The peak of the resident bytes, from the kernel."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(count: int, limit: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(Path(folder), CONFIG.format(limit=limit)) as pool,
    ):
        with pool.client() as client:
            client.generate("m", "warm", max_tokens=2)
        before = pool.worker("m/0")
        started = time.monotonic()
        seen = asyncio.run(load(pool.run_dir, before["pid"], jobs_of(count)))
        took = time.monotonic() - started
        time.sleep(2.5)  # two heartbeats
        after = pool.worker("m/0")
        assert after["pid"] == before["pid"], pool.log()
        early = [rss for done, rss in seen.rss if EARLY <= done < 2 * EARLY]
        late = [rss for done, rss in seen.rss if done >= count - LATE]
        return {
            "requests": count,
            "seconds": round(took, 1),
            "limit": limit,
            "ends": dict(seen.ends),
            "rss at the start": before["memory"]["rss"],
            "rss, high-water mark": high_water(after["pid"]),
            "active, highest": after["memory"]["highest"],
            "rss after the first": statistics.median(early),
            "rss at the last": statistics.median(late),
            "tokens that fit, first and last": [
                one["memory"]["capacity_tokens"] for one in (before, after)
            ],
            "preemptions": after["memory"]["preemptions"],
            "evictions": after["prefix"]["evictions"],
        }


def failures(found: dict[str, Any]) -> list[str]:
    """The expectations that do not hold."""
    faults = [
        f"{name}: {found[name]} bytes, the limit is {found['limit']}"
        for name in ("rss, high-water mark", "active, highest")
        if found[name] > found["limit"]
    ]
    if found["ends"] != {"length": found["requests"]}:
        faults.append(f"requests ended {found['ends']}")
    faults += [
        f"only {found[name]} {name}, {least} are wanted"
        for name, least in MIN_COUNTS.items()
        if found[name] < least
    ]
    growth = found["rss at the last"] / found["rss after the first"] - 1
    if growth > MAX_GROWTH:
        faults.append(f"the level grew by {growth:.1%}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--limit", type=int, default=190, help="MiB of the worker")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.requests, options.limit * MIB)
    faults = failures(found)
    print(f"{report.versions()}; {report.machine()}\n")
    rows = [(name, str(value)) for name, value in found.items()]
    print(report.table(("memory", "measured"), rows))
    for fault in faults:
        print(f"fault: {fault}")
    report.save(options.json, {**found, "faults": faults})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
