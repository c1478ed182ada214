"""A program that performs single operations on a store, by commands of a test.

    python -m support.store_console FOLDER [--reserve BYTES] [--operations N]

A line of input is a command and its numbers; the answer is a line. `submit`, `progress`, `finish`,
`release` and `read` are answered immediately: `offered`, or the refusal. `result` waits for the
next result. `health` prints the state of the store, and `sizes` the names of its files.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path

from mlxpool.broker.store.operations import Operation, ReadJob, Release
from mlxpool.broker.store.records import Refused, Result, StoreUnusable
from mlxpool.broker.store.sqlite_store import SqliteOpener
from mlxpool.broker.store.writer import Bounds, StoreWriter
from support.job_store import BOOT, MAX_BYTES, finish, job_id, progress, submit
from support.pool import until


def operation_of(command: str, numbers: list[int]) -> Operation:
    """Returns the operation of a command; its first number is that of a job.

    `submit` may have a second number, the bytes of a blob.
    """
    number, *more = numbers
    if command == "submit":
        return submit(number, blobs=(os.urandom(more[0]),) if more else ())
    if command == "progress":
        return progress(number, *more)
    if command == "finish":
        return finish(number)
    if command == "release":
        return Release(job_id(number))
    assert command == "read", command
    return ReadJob(job_id(number))


def shown(operation: Operation, result: Result) -> str:
    """Returns the line that the program prints for an operation and its result."""
    what = result.code if isinstance(result, Refused) else type(result).__name__
    return f"{type(operation).__name__} {what} {getattr(result, 'pos', '')}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reserve", type=int, default=0)
    parser.add_argument("--operations", type=int, default=4096)
    flags = parser.parse_args()
    state = flags.folder / "state"
    opener = SqliteOpener(state, MAX_BYTES, reserve_bytes=max(1, flags.reserve))
    woken = threading.Event()
    bounds = Bounds(operations=flags.operations)
    try:
        writer = StoreWriter(opener, BOOT, woken.set, bounds=bounds, retry=0.05)
    except StoreUnusable as error:
        print(f"unusable: {error}", flush=True)
        sys.exit(1)
    writer.start()
    results: list[tuple[Operation, Result]] = []

    def any_result() -> bool:
        results.extend(writer.take())
        return bool(results)

    def next_result() -> str:
        until(any_result, "a result")
        return shown(*results.pop(0))

    def health() -> str:
        now = writer.health
        return f"{now.state} {now.operations}"

    for line in sys.stdin:
        command, *rest = line.split()
        match command:
            case "result":
                answer = next_result()
            case "health":
                answer = health()
            case "sizes":
                answer = " ".join(sorted(os.listdir(state)))
            case _:
                refused = writer.offer(operation_of(command, [int(word) for word in rest]))
                answer = "offered" if refused is None else refused.code
        print(answer, flush=True)
    writer.close()


if __name__ == "__main__":
    main()
