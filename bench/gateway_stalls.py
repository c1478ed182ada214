"""Measures how long the gateway's event loop is held up while large files and batches pass it.

    python bench/gateway_stalls.py [--megabytes 200] [--lines 50000] [--json FILE]

A task of the gateway's own loop sleeps for a millisecond again and again, and notes how late it
wakes: the longest stall of the loop (`loop_ms`). `cpu_ms` is the most processor time that the
gateway's process took between two looks: on a busy machine that says what the gateway itself does.
Beside that `/health` is asked 20 times a second; its time has the broker's in it. The model answers
nothing while this is measured: it has no free place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.server import THREAD_SWITCH_INTERVAL, listen, make_server
from mlxpool.gateway.settings import Settings

CONFIG = """
[pool]
state_dir = "{state_dir}"
[models.m]
path = "builtin:counting"
sequences = 1
counting.step_us = 60000000
"""
PACE = 0.001  # seconds between two looks of the loop
HEALTH = 0.05  # seconds between two questions for /health
PIECE = 256 * 1024  # bytes of an upload that are sent at once
ENDPOINT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG_LINES, LONG_MEGABYTES = 8, 3.5  # lines near the bound, and what each has
BOUNDARY = "stalls"


# ---- the gateway's process -----------------------------------------------------------------------


async def watch(conn: Connection) -> None:
    """Note how late this task wakes; answer each message with the longest delay since the last.

    Beside it is the most processor time between two looks. Both are seconds.
    """
    worst = most = 0.0
    while True:
        due, used = time.perf_counter() + PACE, time.process_time()
        await asyncio.sleep(PACE)
        worst = max(worst, time.perf_counter() - due)
        most = max(most, time.process_time() - used)
        if conn.poll():
            conn.recv()
            conn.send((worst, most))
            worst = most = 0.0


def serve(run_dir: Path, conn: Connection) -> None:
    """Serve as `mlxpool gateway` does, beside the task that watches the loop."""
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL)
    gateway = Gateway(Settings(run_dir=run_dir, port=0, access_log=False))
    bound = listen(gateway.settings)
    conn.send(bound.getsockname()[1])

    async def main() -> None:
        watching = asyncio.create_task(watch(conn))
        await make_server(gateway).serve([bound])
        watching.cancel()

    asyncio.run(main())


@contextlib.contextmanager
def gateway_of(run_dir: Path) -> Iterator[tuple[str, Connection]]:
    """A gateway in a process of its own; its URL, and where its stalls are asked for."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(run_dir, theirs))
    process.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        until_healthy(url)
        yield url, ours
    finally:
        process.terminate()
        process.join()


def until_healthy(url: str) -> None:
    """Wait until the gateway answers."""
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("the gateway did not start")


# ---- what is measured ----------------------------------------------------------------------------


def lines_of(count: int, size: int) -> bytes:
    """A file of chat requests, of which each has about `size` bytes."""
    made = []
    for number in range(count):
        text = f"{number} " + "word " * max(1, (size - 180) // 5)
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 5}
        line = {"custom_id": f"l{number}", "method": "POST", "url": ENDPOINT, "body": body}
        made.append(json.dumps(line))
    return "\n".join(made).encode()


def long_lines_of(count: int, megabytes: float, *, ids: bool) -> bytes:
    """A file of completions, each with a prompt of so many megabytes: token ids, or text."""
    made = []
    for number in range(count):
        size = int(megabytes * 2**20)
        prompt = [100 + place % 900 for place in range(size // 5)] if ids else "word " * (size // 5)
        body = {"model": "m", "prompt": prompt, "max_tokens": 5}
        line = {"custom_id": f"l{number}", "method": "POST", "url": COMPLETIONS, "body": body}
        made.append(json.dumps(line))
    return "\n".join(made).encode()


def upload(url: str, data: bytes) -> str:
    """Send a file; returns its id."""
    head = (
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    ).encode()

    def pieces() -> Iterator[bytes]:
        yield head
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]
        yield f"\r\n--{BOUNDARY}--\r\n".encode()

    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = httpx.post(f"{url}/v1/files", content=pieces(), headers=kind, timeout=600)
    answer.raise_for_status()
    return str(answer.json()["id"])


def create(url: str, file: str, endpoint: str = ENDPOINT) -> None:
    """Make a batch of a file."""
    body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"}
    answer = httpx.post(f"{url}/v1/batches", json=body, timeout=600)
    answer.raise_for_status()
    assert answer.json()["status"] == "in_progress", answer.text


def observed(url: str, stalls: Connection, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `work` returns, and the figures of the time that it took."""
    health: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client() as client:
            while not over.wait(HEALTH):
                begin = time.perf_counter()
                client.get(f"{url}/health").raise_for_status()
                health.append(time.perf_counter() - begin)

    asking = threading.Thread(target=ask)
    stalls.send("begin")
    stalls.recv()
    asking.start()
    begin = time.perf_counter()
    try:
        found = work()
    finally:
        took = time.perf_counter() - begin
        over.set()
        asking.join()
    stalls.send("end")
    worst, most = stalls.recv()
    return found, {
        "seconds": round(took, 1),
        "loop_ms": round(1000 * worst, 1),
        "cpu_ms": round(1000 * most, 1),
        "health_max_ms": round(1000 * max(health, default=0.0), 1),
        "health_p50_ms": round(1000 * statistics.median(health or [0.0]), 1),
    }


def measure(megabytes: int, lines: int) -> dict[str, dict[str, float]]:
    """The figures of each step."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        (run_dir / "state").mkdir(mode=0o700)
        with (
            serving(run_dir, CONFIG.format(state_dir=run_dir / "state")),
            gateway_of(run_dir) as (url, stalls),
        ):
            _, found["idle"] = observed(url, stalls, lambda: time.sleep(5))
            size = megabytes * 2**20 // lines
            data = lines_of(lines, size)
            file, found["upload"] = observed(url, stalls, lambda: upload(url, data))
            _, found["batch"] = observed(url, stalls, lambda: create(url, file))
            short = lines_of(lines, 180)
            file, found["upload, short lines"] = observed(url, stalls, lambda: upload(url, short))
            _, found["batch, short lines"] = observed(url, stalls, lambda: create(url, file))
            for name, ids in (("long lines of ids", True), ("long lines of text", False)):
                file = upload(url, long_lines_of(LONG_LINES, LONG_MEGABYTES, ids=ids))
                make = partial(create, url, file, COMPLETIONS)
                _, found[f"batch, {name}"] = observed(url, stalls, make)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="of the large file (200)")
    parser.add_argument("--lines", type=int, default=50_000, help="of each file (50,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    found = measure(options.megabytes, options.lines)
    for name, row in found.items():
        print(f"{name:22}", *(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json is not None:
        report.save(options.json, found)


if __name__ == "__main__":
    main()
