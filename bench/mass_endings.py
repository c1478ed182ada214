"""Measures for how long a broker serves nobody else while many streams of one client end at once.

    python bench/mass_endings.py [--streams 10000 50000] [--places 128] [--json FILE]

The broker's core in this process, without sockets and workers: it handles what follows from the end
of the client's connection, from its silence and from the revocation of its key, event by event, and
the log lines of the requests are made and thrown away. Half of all requests that wait are those of
another connection, in turn with the client's. The same for all streams of a model that is
unavailable after its worker ended, and for those of the pool when the time of a drain is over, and
when the broker ends. An event is not interrupted, so the longest one is
what workers and other clients wait for. Times are of the processor. The same program runs on other
checkouts of the broker.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mlxpool.bench import report
from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.logs import Logfmt
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.from_worker import Credit, Hello

CLIENT, OTHER = 1, 2  # links
OWNERS = {CLIENT: "key:client", OTHER: "key:other"}
GRACE = 10.0  # seconds: `client_grace`
DURABLE = {"its connection ends": False, "it is silent": True, "its key is revoked": True}
ALL = ("its model fails", "the pool is drained", "the broker ends")  # cases that leave no stream


class Broker:
    """A core with one worker, at a time that stands still."""

    def __init__(self, places: int, streams: int, *, shared: bool) -> None:
        """`shared`: another connection has as many streams."""
        config = PoolConfig(
            run_dir=Path("/nowhere"),
            models={"m": ModelConfig(path="builtin:counting")},
            queue_limit=10**6,
            queue_bytes=1 << 40,
            client_grace=GRACE,
            restart_limit=1,
        )
        self.core = Core(config, boot=1)
        self.now = 1000.0
        self.longest = self.total = 0.0  # seconds
        self.events = 0
        self._log = logging.getLogger("mass_endings")
        self.do(ev.LoadModel("m"))
        hello = Hello(
            slot="m/0", model="m", pid=1, start_time=0.0, host="", digest="", context=4096
        )
        self.do(ev.WorkerHello("m/0", hello))
        self.do(ev.WorkerCredit(self.core.state.last_epoch, Credit(places, 0)))
        self._count, self._shared = streams, shared

    def do(self, event: ev.Event) -> None:
        began = time.thread_time()
        for action in self.core.handle(event, self.now):
            if isinstance(action, act.Note):
                self._log.info(action.event, extra=dict(action.fields))
        took = time.thread_time() - began
        self.longest, self.total = max(self.longest, took), self.total + took
        self.events += 1

    def generate(self, *, durable: bool, one_owner: bool) -> None:
        """All connections send as many requests, in turn."""
        body = {"model": "m", "prompt": "x", "durable": durable, "options": {"max_tokens": 9}}
        message = Generate.parse(body, ())
        for number in range((1 + self._shared) * self._count):
            link = OTHER if self._shared and number % 2 else CLIENT
            owner = OWNERS[CLIENT if one_owner else link]
            id = number.to_bytes(16, "big")
            self.do(ev.ClientGenerate(link, owner, id, 1, b"", message, number))

    def end(self, case: str) -> None:
        """Measure from the fault on."""
        if case == "it is silent":
            self.now += GRACE - 1
            self.do(ev.ClientHeard(OTHER))
            self._wake()
            self.now += 1.1
        self.longest = self.total = 0.0
        self.events = 0
        if case == "its connection ends":
            self.do(ev.LinkLost(CLIENT))
        elif case == "its key is revoked":
            self.do(ev.Revoked(OWNERS[CLIENT]))
        elif case == "its model fails":
            self.do(ev.WorkerExited("m/0", "killed by SIGSEGV", own=True))
        elif case == "the pool is drained":
            self.do(ev.StartDrain(None, None, 0.0))
        elif case == "the broker ends":
            self.do(ev.Shutdown())
        self._wake()
        left, others = len(self.core.state.requests), self._count * self._shared
        if left != others:
            raise SystemExit(f"{left} streams are left, those of the other client are {others}")

    def _wake(self) -> None:
        while self.core.next_wake() <= self.now:
            self.do(ev.Wake())


def measured(places: int, counts: list[int]) -> Iterator[tuple[str, int, Broker]]:
    for case in (*DURABLE, *ALL):
        for streams in counts:
            broker = Broker(places, streams, shared=case not in ALL)
            durable = DURABLE.get(case, True)
            broker.generate(durable=durable, one_owner=case != "its key is revoked")
            broker.end(case)
            yield case, streams, broker


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[10_000, 50_000])
    parser.add_argument("--places", type=int, default=128, help="of the worker (128)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    handler = logging.StreamHandler(open("/dev/null", "w"))  # noqa: SIM115  # as long as we are
    handler.setFormatter(Logfmt())
    logging.getLogger("mass_endings").addHandler(handler)
    logging.getLogger("mass_endings").setLevel(logging.INFO)
    rows, figures = [], []
    for case, streams, broker in measured(given.places, given.streams):
        longest, total = 1e3 * broker.longest, broker.total
        rows.append((case, f"{streams:,}", f"{longest:,.1f}", f"{total:.2f}", f"{broker.events:,}"))
        figures.append({"case": case, "streams": streams, "longest_ms": longest, "total_s": total})
    print(report.machine())
    head = (
        "what ends the client's streams",
        "streams",
        "longest event, ms",
        "together, s",
        "events",
    )
    print(report.table(head, rows))
    report.save(given.json, {"endings": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
