"""Measures what Python's full collections cost a broker with many live streams: time and memory.

    python bench/collection_pauses.py [--streams 9000] [--ends 40000] [--rate 200] [--leak BYTES]
                                      [--rounds 3] [--json FILE]

The broker's core in a process of its own for each way, without sockets: so many streams
arrive and wait, the client cancels one after the other and sends another for each. A turn is an end
and an arrival; `--rate` of them are a second of the broker's time, which is made up. Times that are
shown are of the processor. One way has the collector as Python starts it, one as the broker sets it
(`broker/edge/full_collections.py`), and one the same without its look at the growth of the process.
`--leak`: each arrival leaves a cycle of so many bytes behind that only full collections free. The
memory is the most that is resident after a turn. The runs take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mass_endings import CLIENT, OWNERS, Broker
from mlxpool.bench import report
from mlxpool.broker.core import events as ev
from mlxpool.broker.edge.full_collections import FullCollections
from mlxpool.broker.host.os_process import resident_bytes
from mlxpool.common.protocol.from_client import Generate

AS_SET, RARE = "as the broker sets it", "the same, growth unseen"
WAYS = ("as Python starts it", AS_SET, RARE)
BODY = {"model": "m", "prompt": "x", "options": {"max_tokens": 9}}
MEMORY_TURNS = 100  # between two looks at the memory
AGE = 2000  # turns after which what leaks is dropped: it is in the oldest generation by then


class Leak:
    """A cycle."""

    def __init__(self, size: int) -> None:
        self.itself = self
        self.bytes = bytearray(size)


def measure(way: str, streams: int, ends: int, rate: float, leak: int) -> dict[str, Any]:
    broker = Broker(0, streams, shared=False)
    pauses: list[float] = []
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if info["generation"] == 2:
            if phase == "stop":
                pauses.append(time.thread_time() - began)
            began = time.thread_time()

    memory = partial(resident_bytes, os.getpid())
    collections = FullCollections(lambda: True, memory if way == AS_SET else lambda: 0)
    if way in (AS_SET, RARE):
        collections.start(0.0)
    gc.callbacks.append(note)
    broker.generate(durable=True, one_owner=True)
    arrivals = 1e3 * broker.longest
    begin = peak = memory()
    leaks: list[Leak] = []
    turns: list[float] = []
    message = Generate.parse(BODY, ())
    for number in range(ends):
        start = time.thread_time()
        if leak:
            leaks.append(Leak(leak))
            if len(leaks) > AGE:
                del leaks[0]
        broker.do(ev.CancelRequest(CLIENT, OWNERS[CLIENT], number.to_bytes(16, "big")))
        id = (streams + number).to_bytes(16, "big")
        broker.do(ev.ClientGenerate(CLIENT, OWNERS[CLIENT], id, 1, b"", message, number))
        if way in (AS_SET, RARE):
            collections.on_turn(number / rate)
        turns.append(time.thread_time() - start)
        if number % MEMORY_TURNS == 0:
            peak = max(peak, memory())
    gc.callbacks.remove(note)
    turns.sort()
    return {
        "full": len(pauses),
        "longest_full_ms": 1e3 * max(pauses, default=0.0),
        "arrival_ms": arrivals,
        "p99_ms": 1e3 * turns[int(0.99 * len(turns))],
        "p9999_ms": 1e3 * turns[int(0.9999 * len(turns))],
        "longest_ms": 1e3 * turns[-1],
        "mean_us": 1e6 * statistics.mean(turns),
        "begin_mb": begin / 1e6,
        "peak_mb": peak / 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=9000)
    parser.add_argument("--ends", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=200.0, help="ends a second (200)")
    parser.add_argument("--leak", type=int, default=0, help="bytes of the cycle of each arrival")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way is not None:
        found = measure(given.way, given.streams, given.ends, given.rate, given.leak)
        print(json.dumps(found))
        return 0
    rows, figures = [], []
    for number in range(given.rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            program = [sys.executable, __file__, f"--way={way}", f"--streams={given.streams}"]
            program += [f"--ends={given.ends}", f"--rate={given.rate}", f"--leak={given.leak}"]
            found = json.loads(subprocess.check_output(program, text=True))
            figures.append({"way": way, **found})
            rows.append(
                (way, str(found["full"]), *(f"{found[key]:,.2f}" for key in list(found)[1:]))
            )
    head: tuple[str, ...] = ("the collector", "full collections", "longest of them, ms")
    head = (
        *head,
        "first arrivals, longest, ms",
        "a turn, p99, ms",
        "p99.99, ms",
        "longest, ms",
        "mean, us",
        "memory at the begin, MB",
        "most memory, MB",
    )
    print(report.machine())
    print(report.table(head, rows))
    report.save(given.json, {"collections": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
