"""Measures jobs through the whole pool: how soon one is accepted, and tokens/s beside streams.

    python bench/job_rates.py [--rate 200] [--seconds 20] [--model demo] [--at-once 32]
                              [--requests 192] [--tokens 100] [--rounds 5] [--json FILE]

First, jobs of 20 tokens of the model `counting` are submitted at fixed times, `--rate` a second.
The time until the broker says `accepted` includes the commit and its fsync, and is counted from
the time at which the job was to be submitted, so that a late submission counts as well.

Then the same requests of `--model` run as streams and as jobs, in turn, `--at-once` at a time. A
job is submitted and read to its end; its output goes through the store.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.client import AsyncClient

CONFIG = """
[pool]
state_dir = "{state_dir}"
[models.rates]
path = "builtin:counting"
sequences = 64
[models.pairs]
path = "builtin:{model}"
sequences = {at_once}
"""
SHORT = 20  # tokens of the jobs that are submitted at fixed times


async def accepted_after(client: AsyncClient, rate: float, seconds: float) -> list[float]:
    """Seconds from the time at which each job was to be submitted until it was accepted."""
    begin = time.perf_counter() + 0.5

    async def submit(number: int) -> float:
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await client.submit("rates", "hello", key=f"r{number}", max_tokens=SHORT)
        return time.perf_counter() - due

    return list(await asyncio.gather(*(submit(number) for number in range(int(rate * seconds)))))


async def tokens_per_second(
    run: Callable[[int], Awaitable[int]], requests: int, at_once: int
) -> float:
    """Tokens/s of `requests` calls of `run(number)`, which gives tokens, `at_once` at a time."""
    numbers = iter(range(requests))

    async def work() -> int:
        return sum([await run(number) for number in numbers])

    begin = time.perf_counter()
    tokens = sum(await asyncio.gather(*(work() for _ in range(at_once))))
    return tokens / (time.perf_counter() - begin)


async def measure(options: argparse.Namespace, run_dir: Path) -> dict[str, list[float]]:
    """The times to `accepted` in milliseconds, and the rates of streams and jobs by round."""
    found: dict[str, list[float]] = {"accepted_ms": [], "streams": [], "jobs": []}
    async with AsyncClient(run_dir) as client:
        await tokens_per_second(lambda _: as_stream(client, "rates", 2), 1, 1)
        waits = await accepted_after(client, options.rate, options.seconds)
        found["accepted_ms"] = [1000 * wait for wait in waits]
        for turn in range(-1, options.rounds):

            def stream(_: int) -> Awaitable[int]:
                return as_stream(client, "pairs", options.tokens)

            def job(number: int, turn: int = turn) -> Awaitable[int]:
                return as_job(client, f"p{turn}-{number}", options.tokens)

            for name, run in (("streams", stream), ("jobs", job)):
                rate = await tokens_per_second(run, options.requests, options.at_once)
                if turn >= 0:  # the turn before the first is the warm-up
                    found[name].append(rate)
    return found


async def as_stream(client: AsyncClient, model: str, tokens: int) -> int:
    """The number of tokens of one stream, read delta by delta."""
    async with client.stream(model, "Once upon a time", max_tokens=tokens) as stream:
        return sum([len(delta.ids) async for delta in stream])


async def as_job(client: AsyncClient, key: str, tokens: int) -> int:
    """The number of tokens of one job, submitted and read delta by delta."""
    await client.submit("pairs", "Once upon a time", key=key, max_tokens=tokens)
    async with client.fetch(key) as stream:
        return sum([len(delta.ids) async for delta in stream])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="jobs submitted a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", default="demo", help="a built-in model, for the pairs")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--requests", type=int, default=192, help="of each side in each round")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        state_dir = run_dir / "state"
        state_dir.mkdir(mode=0o700)
        config = CONFIG.format(state_dir=state_dir, model=options.model, at_once=options.at_once)
        with serving(run_dir, config):
            found = asyncio.run(measure(options, run_dir))
    waits = statistics.quantiles(found["accepted_ms"], n=100, method="inclusive")
    ratios = [job / stream for stream, job in zip(found["streams"], found["jobs"], strict=True)]
    print(f"{report.versions()}; {report.machine()}")
    print(
        f"submit to accepted at {options.rate:g} jobs/s: {waits[49]:.2f} / {waits[98]:.2f} /"
        f" {max(found['accepted_ms']):.2f} ms (median / p99 / maximum)"
    )
    print(
        f"{options.model}, {options.at_once} at once: streams {report.spread(found['streams'], 0)}"
        f" tokens/s, jobs {report.spread(found['jobs'], 0)}, ratio {report.spread(ratios, 3)}"
    )
    report.save(options.json, {**found, "ratios": ratios, "accepted_p99_ms": waits[98]})


if __name__ == "__main__":
    main()
