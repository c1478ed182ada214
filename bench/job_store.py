"""Measures how soon a job is accepted: from `submit` to the commit that holds it, fsync included.

    python bench/job_store.py [--rate 200] [--running 64] [--ids 20] [--seconds 20]
                              [--folder DIR | --postgres]

Jobs are submitted at fixed times, `--rate` a second, while `--running` jobs write output, each with
one operation in flight and `--ids` new ids a second. Measured is the store with its thread, without
the broker and its sockets. The first line is what the disk itself needs: a write of 4 KiB and
fdatasync, alone. `--postgres` starts a server of its own, as the tests do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlxpool.broker.store.operations import Operation, Progress, Submit
from mlxpool.broker.store.records import Durable, Result, Submitted
from mlxpool.broker.store.sql.sql_store import Opener
from mlxpool.broker.store.sqlite_store import SqliteOpener
from mlxpool.broker.store.writer import StoreWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

MAX_BYTES = 4 << 30
REQUEST_BYTES = 1000
FIRST_NEW = 1_000_000  # the number of the first job that is submitted at a fixed time
PROBES = 200


def percentiles(seconds: Sequence[float]) -> str:
    """Median, p99 and maximum in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{1000 * cuts[49]:.2f} / {1000 * cuts[98]:.2f} / {1000 * max(seconds):.2f} ms"


def probe(folder: Path) -> list[float]:
    """Seconds of a write of one page and its fdatasync."""
    descriptor = os.open(folder / "probe", os.O_RDWR | os.O_CREAT, 0o600)
    seconds = []
    try:
        for index in range(PROBES):
            begin = time.perf_counter()
            os.pwrite(descriptor, os.urandom(4096), 4096 * index)
            (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(descriptor)
            seconds.append(time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        os.unlink(folder / "probe")
    return seconds


class Load:
    """The submits and the running jobs of one measurement."""

    def __init__(self, opener: Opener, flags: argparse.Namespace) -> None:
        self._woken = threading.Event()
        self.writer = StoreWriter(opener, 1, self._woken.set)
        self.transactions = 0
        perform = self.writer._store.transaction

        def counted(operations: Sequence[Operation], now: float) -> list[Result]:
            self.transactions += 1
            return perform(operations, now)

        self.writer._store.transaction = counted  # type: ignore[method-assign]
        self.writer.start()
        self._flags = flags
        self._offered: dict[int, float] = {}  # number of a job -> when it was submitted
        self.accepted: list[float] = []  # seconds from submit to the result
        self.durable: list[float] = []  # seconds from the offer of output to the result
        self._written: dict[int, tuple[int, float]] = {}  # running job -> (ids, when offered)

    def run(self) -> float:
        """Returns the seconds that it took."""
        from support.job_store import submit

        for number in range(self._flags.running):
            assert self.writer.offer(submit(number)) is None
            self._written[number] = (0, 0.0)
        self._wait_for(lambda: len(self.accepted) == self._flags.running)
        self.accepted.clear()
        self.transactions = 0
        begin = time.perf_counter()
        count = int(self._flags.rate * self._flags.seconds)
        for index in range(count):
            at = begin + index / self._flags.rate
            while (left := at - time.perf_counter()) > 0:
                self._woken.wait(left)
                self._take(begin)
            number = FIRST_NEW + index
            self._offered[number] = time.perf_counter()
            operation = submit(number, request=os.urandom(REQUEST_BYTES))
            assert self.writer.offer(operation) is None, "the store cannot keep up"
            self._take(begin)
        self._wait_for(lambda: len(self.accepted) == count, begin)
        return time.perf_counter() - begin

    def _wait_for(self, check: Callable[[], bool], begin: float | None = None) -> None:
        while not check():
            self._woken.wait(1.0)
            self._take(begin)

    def _take(self, begin: float | None) -> None:
        self._woken.clear()
        now = time.perf_counter()
        for operation, result in self.writer.take():
            if isinstance(operation, Submit):
                assert isinstance(result, Submitted), result
                number = int.from_bytes(operation.id, "big")
                self.accepted.append(now - self._offered.pop(number, now))
            elif isinstance(operation, Progress):
                assert isinstance(result, Durable), result
                number = int.from_bytes(operation.id, "big")
                self.durable.append(now - self._written[number][1])
                self._written[number] = (result.pos, 0.0)
        if begin is not None:
            self._write_output(begin)

    def _write_output(self, begin: float) -> None:
        """Offer the ids that jobs without an operation in flight have made since their last."""
        from support.job_store import progress

        now = time.perf_counter()
        made = int(self._flags.ids * (now - begin))
        for number, (ids, offered) in self._written.items():
            if not offered and made > ids:
                self._written[number] = (ids, now)
                assert self.writer.offer(progress(number, ids, made - ids)) is None


@contextmanager
def opened(flags: argparse.Namespace, folder: Path) -> Iterator[Opener]:
    """The store that the flags name."""
    if not flags.postgres:
        yield SqliteOpener(folder / "state", MAX_BYTES)
        return
    from mlxpool.broker.store.postgres_store import PostgresOpener
    from support.postgres_server import PostgresServer

    with PostgresServer() as server:
        yield PostgresOpener(server.new_url(), MAX_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=200.0, help="jobs submitted a second")
    parser.add_argument("--running", type=int, default=64, help="jobs that write output")
    parser.add_argument("--ids", type=float, default=20.0, help="ids a second of each")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, help="where the store is; a temporary folder")
    parser.add_argument("--postgres", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        folder = Path(name)
        print(f"write and fdatasync alone: {percentiles(probe(folder))} (median / p99 / max)")
        with opened(flags, folder) as opener:
            load = Load(opener, flags)
            took = load.run()
            print(f"submit to accepted: {percentiles(load.accepted)}, {len(load.accepted)} jobs")
            print(f"output to durable: {percentiles(load.durable)}, {len(load.durable)} chunks")
            rate = load.transactions / took
            done = (len(load.accepted) + len(load.durable)) / load.transactions
            print(f"{rate:.0f} commits a second of {done:.1f} operations")
            load.writer.close()


if __name__ == "__main__":
    main()
