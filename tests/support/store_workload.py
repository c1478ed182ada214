"""A program that writes jobs into a store, and reports the acknowledgements, for crash tests.

    python -m support.store_workload FOLDER [--jobs N] [--seed N] [--mutant NAME] [--print]

Acknowledgements go into the log of disk_shim, as marks, and with --print to the output. A mutant
breaks one rule of the store, which the tests must detect.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import threading
from collections.abc import Callable
from pathlib import Path

from mlxpool.broker.store import sqlite_store, state_dir
from mlxpool.broker.store.operations import Operation, Release
from mlxpool.broker.store.records import Changed, Durable, JobState, Refused, Result, Submitted
from mlxpool.broker.store.sqlite_store import SqliteDatabase, SqliteOpener, SqliteStore
from mlxpool.broker.store.writer import StoreWriter
from support.job_store import BOOT, MAX_BYTES, finish, job_id, progress, submit

IN_FLIGHT = 24  # most operations in flight, so that a commit has several
MAX_IDS = 60  # the most ids of a job
SMALL_LOG = 128 * 1024  # bytes; a small log is often copied into the database
MUTANTS = ("none", "normal", "off", "early", "parent")


def break_a_rule(mutant: str) -> None:
    """Breaks a rule of the store, so that it loses acknowledged operations."""
    if mutant in ("normal", "off"):
        sqlite_store.PRAGMAS["synchronous"] = mutant.upper()
    elif mutant == "early":  # results are reported before the commit
        begin, commit = SqliteDatabase.begin, SqliteDatabase.commit

        def late_begin(self: SqliteDatabase) -> None:
            if self._connection.in_transaction:
                commit(self)
            begin(self)

        SqliteDatabase.begin = late_begin  # type: ignore[method-assign]
        SqliteDatabase.commit = lambda self: None  # type: ignore[method-assign]
        SqliteStore.tend = lambda self: None  # type: ignore[method-assign]
    elif mutant == "parent":  # the parent of the folder is not synced
        sync = state_dir.sync
        state_dir.sync = lambda path: None if path.name == "disk" else sync(path)


class Workload:
    """Jobs that are submitted, run and ended in a random order."""

    def __init__(self, writer: StoreWriter, jobs: int, draw: random.Random) -> None:
        self._writer, self._draw = writer, draw
        self._left = list(range(1, jobs + 1))
        self._running: dict[int, int] = {}  # number -> ids requested
        self._busy: set[int] = set()  # numbers of jobs with an operation in flight
        self._in_flight = 0

    def run(self, woken: threading.Event, told: Callable[[str], None]) -> None:
        """Runs until every job has ended and every result is known."""
        while self._left or self._running or self._in_flight:
            while self._in_flight < IN_FLIGHT and self._next():
                pass
            woken.wait(10.0)
            woken.clear()
            for operation, result in self._writer.take():
                self._in_flight -= 1
                self._note(operation, result, told)

    def _next(self) -> bool:
        """Offers one operation; returns whether there was an operation to offer."""
        idle = [number for number in self._running if number not in self._busy]
        if self._left and (not idle or self._draw.random() < 0.4):
            number = self._left.pop()
            self._running[number] = 0
            blobs = (b"shared" * 50, bytes([number % 256]) * self._draw.randint(1, 3000))
            return self._offer(number, submit(number, blobs=blobs))
        if not idle:
            return False
        number = self._draw.choice(idle)
        at = self._running[number]
        if at >= MAX_IDS or self._draw.random() < 0.1:
            state = self._draw.choice((JobState.DONE, JobState.DONE, JobState.DEAD))
            self._running.pop(number)
            return self._offer(number, finish(number, state))
        count = self._draw.randint(1, 12)
        self._running[number] = at + count
        return self._offer(number, progress(number, at, count, facts=b"facts"))

    def _offer(self, number: int, operation: Operation) -> bool:
        refused = self._writer.offer(operation)
        assert refused is None, refused
        self._busy.add(number)
        self._in_flight += 1
        return True

    def _note(self, operation: Operation, result: Result, told: Callable[[str], None]) -> None:
        assert not isinstance(result, Refused), result
        match result:
            case Submitted(job=job):
                number = int.from_bytes(job.id, "big")
                told(f"job {number}")
            case Durable(id=id, pos=pos):
                number = int.from_bytes(id, "big")
                told(f"ids {number} {pos}")
            case Changed(job=job) if isinstance(operation, Release):
                number = int.from_bytes(job.id, "big")
                told(f"gone {number}")
            case Changed(job=job):
                number = int.from_bytes(job.id, "big")
                told(f"end {number} {job.state} {job.end_seq}")
                if number % 5 == 0:
                    self._offer(number, Release(job_id(number)))
                    return
            case _:
                raise AssertionError(f"{operation} had the result {result}")
        self._busy.discard(number)


def _teller(printing: bool) -> Callable[[str], None]:
    mark = getattr(ctypes.CDLL(None), "disk_shim_mark", None)

    def told(text: str) -> None:
        data = text.encode()
        if mark is not None:
            mark(data, ctypes.c_size_t(len(data)))
        if printing:
            print(text, flush=True)

    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutant", choices=MUTANTS, default="none")
    parser.add_argument("--print", action="store_true")
    flags = parser.parse_args()
    sqlite_store.LOG_BYTES = SMALL_LOG
    break_a_rule(flags.mutant)
    opener = SqliteOpener(flags.folder / "state", MAX_BYTES, reserve_bytes=4096)
    woken = threading.Event()
    writer = StoreWriter(opener, BOOT, woken.set)
    writer.start()
    Workload(writer, flags.jobs, random.Random(flags.seed)).run(woken, _teller(flags.print))
    writer.close()


if __name__ == "__main__":
    main()
