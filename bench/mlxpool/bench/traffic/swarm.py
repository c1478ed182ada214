"""Runs many streams from several client processes, against the pool or an HTTP server.

python -m mlxpool.bench.traffic.swarm   # in: a Job as JSON; out: the Arrivals of each stream

A process prints `ready`, then reads the time of the monotonic clock at which all start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MODEL = "bench"
START_DELAY = 0.2  # seconds from the time all processes are ready to the first request


@dataclass(frozen=True, slots=True)
class Job:
    """The streams of one process.

    `target`: the pool's run directory, or HOST:PORT of a server with /v1/completions.
    """

    target: str
    http: bool
    numbers: Sequence[int]  # of the streams, unique in a run
    prompt: int  # tokens
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of one stream: seconds since the start of all, and the tokens of each."""

    times: Sequence[float]
    counts: Sequence[int]
    ids: Sequence[int] = ()

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """One round: tokens/s while all streams ran, seconds to first tokens, gaps in seconds."""

    rate: float
    first: Sequence[float]
    gaps: Sequence[float]


def text_of(number: int, tokens: int) -> str:
    """A prompt of `tokens` bytes; each byte is a token of the random models' vocabulary."""
    start = f"{number:06d} "
    return (start + "the quick brown fox jumps over the lazy dog " * (tokens // 40 + 1))[:tokens]


def run(job: Job, processes: int) -> list[Arrivals]:
    """Run all streams in `processes` processes that start at the same time."""
    shares = [job.numbers[which::processes] for which in range(processes)]
    children = [_child(job, share) for share in shares if share]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # `ready`, or the end of the process
    begin = time.monotonic() + START_DELAY
    for child in children:
        with contextlib.suppress(BrokenPipeError):
            print(begin, file=child.stdin, flush=True)
    found = []
    for child in children:
        output = child.communicate()[0]
        if child.returncode:
            raise SystemExit(f"a process of streams at {job.target} ended: see above")
        found += [Arrivals(**one) for one in json.loads(output)]
    return found


def _child(job: Job, share: Sequence[int]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __spec__.name if __spec__ else "mlxpool.bench.traffic.swarm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    print(json.dumps({**asdict(job), "numbers": list(share)}), file=child.stdin, flush=True)
    return child


def summarise(streams: Sequence[Arrivals]) -> RoundFigures:
    """Tokens/s from the time all streams have had a token to the end of the first stream."""
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    if end <= start:  # the streams never ran all at once, so the whole time counts
        start, end = 0.0, max(stream.times[-1] for stream in streams)
    tokens = sum(
        count
        for stream in streams
        for at, count in zip(stream.times, stream.counts, strict=True)
        if start < at <= end
    )
    gaps = [gap for stream in streams for gap in stream.gaps]
    return RoundFigures(tokens / (end - start), [stream.times[0] for stream in streams], gaps)


# ---- in the process ------------------------------------------------------------------------------


async def _all(job: Job) -> list[Arrivals]:
    if job.http:
        host, _, port = job.target.rpartition(":")
        # One after the other: the server's backlog is short, and a connection that finds it full is
        # retried after seconds.
        links = [await asyncio.open_connection(host, int(port)) for _ in job.numbers]
        begin = _read_start_time()
        every = zip(job.numbers, links, strict=True)
        return await asyncio.gather(*(_run_http(job, n, link, begin) for n, link in every))
    from mlxpool.client import AsyncClient

    client = AsyncClient(Path(job.target))
    try:
        await client.models()  # connected
        begin = _read_start_time()
        return await asyncio.gather(*(_run_pool(client, job, n, begin) for n in job.numbers))
    finally:
        await client.close()


def _read_start_time() -> float:
    """Print `ready`; returns the time to start. Blocks this process until it is known."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


async def _run_pool(client: Any, job: Job, number: int, begin: float) -> Arrivals:
    await _until(begin)
    times, counts, ids = list[float](), list[int](), list[int]()
    prompt = text_of(number, job.prompt)
    stream = client.stream(MODEL, prompt, max_tokens=job.tokens, temperature=0, ignore_eos=True)
    async for delta in stream:
        if delta.ids:
            times.append(time.monotonic() - begin)
            counts.append(len(delta.ids))
            ids += delta.ids
    return Arrivals(times, counts, ids)


async def _run_http(job: Job, number: int, link: Link, begin: float) -> Arrivals:
    """Count server-sent events without parsing them, so that the reader costs little."""
    reader, writer = link
    await _until(begin)
    body = json.dumps(
        {
            "model": "default_model",
            "prompt": text_of(number, job.prompt),
            "max_tokens": job.tokens,
            "temperature": 0,
            "stream": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {job.target}\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + kind + body).encode())
    times, counts = list[float](), list[int]()
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic() - begin)
            counts.append(1)
    writer.close()
    if not times:
        raise SystemExit(f"{job.target} answered a stream with no event")
    return Arrivals(times, counts)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _as_json(streams: Sequence[Arrivals]) -> list[Mapping[str, Any]]:
    return [asdict(one) for one in streams]


def main() -> None:
    job = Job(**json.loads(sys.stdin.readline()))
    json.dump(_as_json(asyncio.run(_all(job))), sys.stdout)


if __name__ == "__main__":
    main()
