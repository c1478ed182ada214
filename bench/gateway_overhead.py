"""Measures streams through the gateway against the same streams of the client, in pairs.

    python bench/gateway_overhead.py [--streams 32] [--tokens 200] [--step-us 10000] [--rounds 5]
                            [--firsts 100] [--json FILE]

The model is `counting`, whose steps take a known time and no processor. This process reads both
sides: the client's deltas, and the gateway's events as lines over persistent connections. The time
to the first token is measured with one stream alone, from the request to the piece that has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxpool.bench import report
from mlxpool.cli.admin import ask
from mlxpool.client import AsyncClient
from mlxpool.common.errors import BrokerLost

START_TIMEOUT = 60.0  # seconds
CONFIG = """
[pool]
state_dir = ""
[models.bench]
path = "builtin:counting"
sequences = {streams}
counting.step_us = {step_us}
"""


@contextmanager
def serving(run_dir: Path, config: str) -> Iterator[int]:
    """Run a broker and a gateway for it; yields the gateway's port."""
    file = run_dir / "mlxpool.toml"
    file.write_text(config)
    command = [sys.executable, "-P", "-m", "mlxpool.cli.main", "--run-dir", str(run_dir)]
    with (run_dir / "log").open("wb") as log:
        broker = subprocess.Popen(
            [*command, "serve", "--state-dir", "", "--config", str(file)], stderr=log
        )
        gateway = subprocess.Popen(
            [*command, "gateway", "--port", "0"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert gateway.stdout is not None
        port = int(gateway.stdout.readline().rpartition(":")[2])
        _wait_for(run_dir)
        yield port
    finally:
        for process in (gateway, broker):
            process.terminate()
            process.wait()
        assert gateway.stdout is not None
        gateway.stdout.close()


def _wait_for(run_dir: Path) -> None:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        try:
            ask(run_dir, "ps")
        except BrokerLost:
            continue
        return
    raise SystemExit("the broker did not start")


async def through_client(client: AsyncClient, tokens: int) -> float:
    """One stream; seconds to its first token."""
    started = time.perf_counter()
    first = 0.0
    count = 0
    async with client.stream("bench", "hello", max_tokens=tokens) as stream:
        async for delta in stream:
            first = first or time.perf_counter() - started
            count += len(delta.ids)
    if count != tokens:
        raise SystemExit(f"{count} tokens came, {tokens} were asked for")
    return first


class Connection:
    """A minimal HTTP client, so that reading costs little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, tokens: int) -> float:
        """One streamed completion; seconds to its first token."""
        body = {"model": "bench", "prompt": "hello", "max_tokens": tokens, "stream": True}
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + data)
        first, received = 0.0, 0
        while not (line := await self._reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise SystemExit("the gateway closed the connection")
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - started
                received += json.loads(line[6:])["choices"][0]["text"].count(" ")
        while await self._reader.readline() != b"0\r\n":
            pass
        await self._reader.readline()
        if received != tokens:
            raise SystemExit(f"{received} tokens came, {tokens} were asked for")
        return first

    def close(self) -> None:
        self._writer.close()


async def rate(
    run_stream: Callable[[int, int], Awaitable[float]], streams: int, tokens: int
) -> float:
    """Tokens/s of all streams together; `run_stream(number, tokens)` runs one."""
    started = time.perf_counter()
    await asyncio.gather(*(run_stream(number, tokens) for number in range(streams)))
    return streams * tokens / (time.perf_counter() - started)


async def measure(options: argparse.Namespace, run_dir: Path, port: int) -> dict[str, list[float]]:
    """Rates and times to the first token of both sides, measured alternately."""
    found: dict[str, list[float]] = {
        "direct": [], "gateway": [], "direct_first_ms": [], "gateway_first_ms": [],
    }  # fmt: skip
    connections = [
        Connection(*await asyncio.open_connection("127.0.0.1", port))
        for _ in range(options.streams)
    ]
    async with AsyncClient(run_dir) as client:

        def direct(number: int, tokens: int) -> Awaitable[float]:
            return through_client(client, tokens)

        def gateway(number: int, tokens: int) -> Awaitable[float]:
            return connections[number].ask(tokens)

        for number in range(-1, options.rounds):
            rates = [
                await rate(side, options.streams, options.tokens) for side in (direct, gateway)
            ]
            if number >= 0:  # round -1 is the warm-up
                found["direct"].append(rates[0])
                found["gateway"].append(rates[1])
        for _ in range(options.firsts):
            found["direct_first_ms"].append(1000 * await direct(0, 2))
            found["gateway_first_ms"].append(1000 * await gateway(0, 2))
    for connection in connections:
        connection.close()
    return found


def show(options: argparse.Namespace, found: dict[str, list[float]]) -> dict[str, float]:
    """Print the table; returns the figures that have targets."""
    ratios = [b / a for a, b in zip(found["direct"], found["gateway"], strict=True)]
    firsts = zip(found["direct_first_ms"], found["gateway_first_ms"], strict=True)
    added = [b - a for a, b in firsts]
    print(f"{report.versions()}; {report.machine()}")
    print(
        f"{options.streams} streams of {options.tokens} tokens, steps of {options.step_us} µs,"
        f" {options.rounds} rounds: median (minimum - maximum)\n"
    )
    rows = [
        ("tokens/s", report.spread(found["direct"], 0), report.spread(found["gateway"], 0),
         f"{report.spread(ratios, 3)} times"),
        ("first token, ms", report.spread(found["direct_first_ms"], 2),
         report.spread(found["gateway_first_ms"], 2), f"{report.spread(added, 2)} more"),
    ]  # fmt: skip
    print(report.table(("", "client", "gateway", "gateway to client"), rows))
    return {"ratio": statistics.median(ratios), "first_added_ms": statistics.median(added)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-us", type=int, default=10000, help="of the model, for all streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--firsts", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = CONFIG.format(streams=options.streams, step_us=options.step_us)
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        with serving(run_dir, config) as port:
            found = asyncio.run(measure(options, run_dir, port))
    report.save(options.json, {**found, **show(options, found)})


if __name__ == "__main__":
    main()
