"""Many streams at once from processes of their own, at the pool or at an HTTP server.

python -m mlxpool.bench.swarm   # a Part as JSON on stdin; each stream's Arrivals on stdout

A process says `ready` and waits for the moment of the monotonic clock at which all begin.
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
LEAD = 0.2  # seconds from the moment that all processes are ready to the first request


@dataclass(frozen=True, slots=True)
class Part:
    """What one process asks.

    `target` is the pool's run directory, or HOST:PORT of a server with /v1/completions.
    """

    target: str
    http: bool
    numbers: Sequence[int]  # of the streams; no two of a run share one
    prompt: int  # tokens
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one stream: seconds from the moment that all began, with the tokens that came then."""

    times: Sequence[float]
    counts: Sequence[int]
    ids: Sequence[int] = ()

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What all streams of a round saw: tokens/s while all ran, and seconds."""

    rate: float
    first: Sequence[float]
    gaps: Sequence[float]


def text_of(number: int, tokens: int) -> str:
    """A prompt of so many bytes, each of which is a token of a made-up vocabulary."""
    start = f"{number:06d} "
    return (start + "the quick brown fox jumps over the lazy dog " * (tokens // 40 + 1))[:tokens]


def run(part: Part, processes: int) -> list[Arrivals]:
    """All streams, begun at the same moment by so many processes."""
    shares = [part.numbers[which::processes] for which in range(processes)]
    children = [_child(part, share) for share in shares if share]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()  # it is ready, or has ended
    begin = time.monotonic() + LEAD
    for child in children:
        with contextlib.suppress(BrokenPipeError):
            print(begin, file=child.stdin, flush=True)
    found = []
    for child in children:
        output = child.communicate()[0]
        if child.returncode:
            raise SystemExit(f"a process of streams at {part.target} ended: see above")
        found += [Arrivals(**one) for one in json.loads(output)]
    return found


def _child(part: Part, share: Sequence[int]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", __spec__.name if __spec__ else "mlxpool.bench.swarm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    print(json.dumps({**asdict(part), "numbers": list(share)}), file=child.stdin, flush=True)
    return child


def seen(streams: Sequence[Arrivals]) -> Seen:
    """tokens/s from the moment that all streams had a token to the end of the first of them."""
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    if end <= start:  # they never ran at once: everything counts
        start, end = 0.0, max(stream.times[-1] for stream in streams)
    tokens = sum(
        count
        for stream in streams
        for at, count in zip(stream.times, stream.counts, strict=True)
        if start < at <= end
    )
    gaps = [gap for stream in streams for gap in stream.gaps]
    return Seen(tokens / (end - start), [stream.times[0] for stream in streams], gaps)


# ---- in the process ------------------------------------------------------------------------------


async def _all(part: Part) -> list[Arrivals]:
    if part.http:
        host, _, port = part.target.rpartition(":")
        # One after the other: the server's queue of connections is short, and who finds it full
        # tries again after seconds.
        links = [await asyncio.open_connection(host, int(port)) for _ in part.numbers]
        begin = _told()
        every = zip(part.numbers, links, strict=True)
        return await asyncio.gather(*(_of_server(part, n, link, begin) for n, link in every))
    from mlxpool.client import AsyncClient

    client = AsyncClient(Path(part.target))
    try:
        await client.models()  # connected
        begin = _told()
        return await asyncio.gather(*(_of_pool(client, part, n, begin) for n in part.numbers))
    finally:
        await client.close()


def _told() -> float:
    """When to begin; nothing else happens in this process until it is said."""
    print("ready", flush=True)
    return float(sys.stdin.readline())


async def _of_pool(client: Any, part: Part, number: int, begin: float) -> Arrivals:
    await _until(begin)
    times, counts, ids = list[float](), list[int](), list[int]()
    prompt = text_of(number, part.prompt)
    stream = client.stream(MODEL, prompt, max_tokens=part.tokens, temperature=0, ignore_eos=True)
    async for delta in stream:
        if delta.ids:
            times.append(time.monotonic() - begin)
            counts.append(len(delta.ids))
            ids += delta.ids
    return Arrivals(times, counts, ids)


async def _of_server(part: Part, number: int, link: Link, begin: float) -> Arrivals:
    """Server-sent events, counted and not parsed: the peer pays for no JSON of ours."""
    reader, writer = link
    await _until(begin)
    body = json.dumps(
        {
            "model": "default_model",
            "prompt": text_of(number, part.prompt),
            "max_tokens": part.tokens,
            "temperature": 0,
            "stream": True,
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {part.target}\r\nConnection: close\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + kind + body).encode())
    times, counts = list[float](), list[int]()
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.monotonic() - begin)
            counts.append(1)
    writer.close()
    if not times:
        raise SystemExit(f"{part.target} answered a stream with no event")
    return Arrivals(times, counts)


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _plain(streams: Sequence[Arrivals]) -> list[Mapping[str, Any]]:
    return [asdict(one) for one in streams]


def main() -> None:
    part = Part(**json.loads(sys.stdin.readline()))
    json.dump(_plain(asyncio.run(_all(part))), sys.stdout)


if __name__ == "__main__":
    main()
