"""What the broker itself costs, beside a bare relay of the same frames in the same run.

A worker that only talks (bench/firehose.py) sends tokens; clients count them. The peer is a pyzmq
loop that polls two ROUTERs and forwards each message as it is: the least that any broker does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import zmq

import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mlxpool.common import sockets, wire
from mlxpool.common.wire import Header
from pool import Pool, with_path

HERE = Path(__file__).parent
PATIENCE_MS = 60_000

# Runs the firehose wherever the broker starts a worker.
DETOUR = """\
import os

if "MLXPOOL_WORKER" in os.environ:
    import runpy

    runpy.run_path({firehose!r}, run_name="__main__")
"""

RELAY = """\
import sys, zmq

context = zmq.Context()
front, back = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
front.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a full peer instead of dropping
front.bind(sys.argv[1]); back.bind(sys.argv[2])
client = front.recv_multipart()[0]
poller = zmq.Poller()
poller.register(front, zmq.POLLIN); poller.register(back, zmq.POLLIN)
print("ready", flush=True)
while True:
    ready = dict(poller.poll())
    if back in ready:
        for _ in range(256):
            try:
                parts = back.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            front.send_multipart([client, *parts[1:]])
    if front in ready:
        front.recv_multipart()
"""


class Counter:
    """A client that asks for streams and counts the ids that come."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = sockets.dealer(context, endpoint)
        self.ids = 0
        self.ended = 0
        self.frames = 0
        self.delays: list[float] = []

    def ask(self, streams: int, tokens: int, *, batch: bool) -> None:
        for _ in range(streams):
            body = {
                "model": "m", "prompt": "x", "batch": batch, "window": 1 << 20,
                "options": {"max_tokens": tokens},
            }  # fmt: skip
            header = Header(wire.GENERATE, os.urandom(16), 0, 1)
            self.socket.send_multipart(wire.encode(header, body))

    def read(self, *, delays: bool) -> None:
        """Everything that is there."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.frames += 1
            if len(parts) > 2:
                self.ids += len(parts[2]) // 4
                if delays:
                    self._delays(wire.decode(parts))
            elif wire.decode(parts).kind in (wire.DONE, wire.ERROR):
                self.ended += 1

    def _delays(self, message: wire.Message) -> None:
        now = time.monotonic_ns()
        texts = [row[3] for row in message.body.get("rows", [])] or [message.body["text"]]
        self.delays += [(now - int(stamp)) / 1e6 for text in texts for stamp in text.split()]


@contextmanager
def pool(plan: Mapping[str, float], folder: Path) -> Iterator[Pool]:
    """A broker whose workers are firehoses."""
    (folder / "sitecustomize.py").write_text(DETOUR.format(firehose=str(HERE / "firehose.py")))
    environment = {"PYTHONPATH": with_path(folder), "FIREHOSE": json.dumps(plan)}
    config = '[models.m]\npath = "builtin:counting"\nsequences = 4096\n'
    with Pool(folder, "[pool]\nbeat_limit = 1000\n" + config, environment=environment) as running:
        yield running


def stream(
    plan: Mapping[str, float], clients: int, *, batch: bool, delays: bool = False
) -> dict[str, Any]:
    """One round through the broker: tokens a second, the broker's processor time, delays."""
    with tempfile.TemporaryDirectory() as name, pool(plan, Path(name)) as running:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        front = sockets.ipc(running.run_dir, "front")
        counters = [Counter(context, front) for _ in range(clients)]
        for counter in counters:
            counter.ask(int(plan["streams"]) // clients, int(plan["tokens"]), batch=batch)
        assert running.process is not None
        result = _count(counters, int(plan["streams"]), running.process.pid, delays=delays)
        for counter in counters:
            counter.socket.close(linger=0)
        context.term()
        return result


def _count(counters: Sequence[Counter], streams: int, pid: int, *, delays: bool) -> dict[str, Any]:
    poller = zmq.Poller()
    for counter in counters:
        poller.register(counter.socket, zmq.POLLIN)
    broker = psutil.Process(pid)
    while not any(counter.ids for counter in counters):
        assert poller.poll(PATIENCE_MS), "no token came"
        for counter in counters:
            counter.read(delays=False)
    start, before = time.monotonic(), broker.cpu_times()
    had = sum(counter.ids for counter in counters)
    while sum(counter.ended for counter in counters) < streams:
        assert poller.poll(PATIENCE_MS), "the streams came to a stop"
        for counter in counters:
            counter.read(delays=delays)
    seconds, after = time.monotonic() - start, broker.cpu_times()
    ids = sum(counter.ids for counter in counters) - had
    cpu = (after.user - before.user) + (after.system - before.system)
    return {
        "ids": ids,
        "seconds": seconds,
        "per_s": ids / seconds,
        "cpu_us": cpu / ids * 1e6,
        "cpu_share": cpu / seconds,
        "frames": sum(counter.frames for counter in counters),
        "delays": [delay for counter in counters for delay in counter.delays],
    }


def relay(plan: Mapping[str, float], *, delays: bool = False) -> dict[str, Any]:
    """The same frames through the bare relay."""
    with tempfile.TemporaryDirectory() as name:
        front, back = f"ipc://{name}/front", f"ipc://{name}/back"
        child = subprocess.Popen(
            [sys.executable, "-c", RELAY, front, back], stdout=subprocess.PIPE, text=True
        )
        talker = subprocess.Popen([sys.executable, "-c", TALKER, str(HERE), back, json.dumps(plan)])
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        counter = Counter(context, front)
        try:
            counter.socket.send(b"hello")
            return _count_relayed(counter, plan, child.pid, delays=delays)
        finally:
            for process in (child, talker):
                process.kill()
                process.wait()
            assert child.stdout is not None
            child.stdout.close()
            counter.socket.close(linger=0)
            context.term()


TALKER = """\
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import zmq
from firehose import talk
from mlxpool.common import sockets

plan = json.loads(sys.argv[3])
context = zmq.Context()
socket = sockets.dealer(context, sys.argv[2])
talk(socket, 1, [(os.urandom(16), n) for n in range(int(plan["streams"]))], plan)
time.sleep(600)
"""


def _count_relayed(
    counter: Counter, plan: Mapping[str, float], pid: int, *, delays: bool
) -> dict[str, Any]:
    """As `_count`; the last frame has come when every id has."""
    process = psutil.Process(pid)
    total = int(plan["streams"]) * int(plan["tokens"])
    while not counter.ids:
        assert counter.socket.poll(PATIENCE_MS), "no frame came"
        _read_relayed(counter, delays=False)
    start, before, had = time.monotonic(), process.cpu_times(), counter.ids
    while counter.ids < total:
        assert counter.socket.poll(PATIENCE_MS), (
            f"the frames came to a stop at {counter.ids} of {total}"
        )
        _read_relayed(counter, delays=delays)
    seconds, after = time.monotonic() - start, process.cpu_times()
    cpu = (after.user - before.user) + (after.system - before.system)
    ids = counter.ids - had
    return {
        "per_s": ids / seconds,
        "cpu_us": cpu / ids * 1e6,
        "cpu_share": cpu / seconds,
        "delays": counter.delays,
    }


def _read_relayed(counter: Counter, *, delays: bool) -> None:
    while True:
        try:
            parts = counter.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        counter.ids += len(parts[-1]) // 4
        if delays:
            counter._delays(wire.decode(parts))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=5.0, help="length of the paced round")
    options.add_argument("--json", type=Path, help="write the figures to this file")
    given = options.parse_args()
    singles, bare, batched = [], [], []
    for _ in range(given.rounds):
        one = {"streams": 16, "rows": 1, "tokens": 4000, "rate": 0}
        singles.append(stream(one, 1, batch=False))
        bare.append(relay(one))
        many = {"streams": 16, "rows": 16, "tokens": 60_000, "rate": 0}
        batched.append(stream(many, 4, batch=True))
    paced_plan = {"streams": 50, "rows": 50, "tokens": int(100 * given.seconds), "rate": 100}
    paced, alone, floor = [], [], []
    for _ in range(given.rounds):
        paced.append(stream(paced_plan, 2, batch=True, delays=True))
        alone.append(stream(paced_plan, 2, batch=False, delays=True))
        floor.append(relay(paced_plan, delays=True))
    rows = _table(singles, bare, batched) + _paced_table(paced, alone, floor)
    print(report.machine())
    print(report.versions())
    print(report.table(("what", "median (min - max)"), rows))
    report.write(given.json, {"broker": [list(row) for row in rows]})
    return 0


def _table(
    singles: Sequence[Mapping[str, Any]],
    bare: Sequence[Mapping[str, Any]],
    batched: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
    ratios = [ours["per_s"] / peer["per_s"] for ours, peer in zip(singles, bare, strict=True)]
    costs = [peer["cpu_us"] / ours["cpu_us"] for ours, peer in zip(singles, bare, strict=True)]
    return [
        ("bare relay, worker frames/s", report.spread([r["per_s"] for r in bare], 0)),
        ("broker, worker frames/s (one row each)", report.spread([r["per_s"] for r in singles], 0)),
        ("ratio of frames/s", report.spread(ratios, 2)),
        ("ratio of frames per processor second", report.spread(costs, 2)),
        (
            "16 rows a frame, 4 clients, batch: tokens/s",
            report.spread([r["per_s"] for r in batched], 0),
        ),
        (
            "the same, processor time per token, us",
            report.spread([r["cpu_us"] for r in batched], 2),
        ),
    ]


def _paced_table(
    batched: Sequence[Mapping[str, Any]],
    alone: Sequence[Mapping[str, Any]],
    floor: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
    """50 streams of 100 tokens a second; `floor` is the bare relay at the same pace."""
    rows = []
    for name, rounds in (("with batch", batched), ("without batch", alone), ("bare relay", floor)):
        p50 = [statistics.median(one["delays"]) for one in rounds]
        p99 = [_p99(one) for one in rounds]
        shares = [one["cpu_share"] for one in rounds]
        rows += [
            (f"50 streams x 100 tokens/s, {name}: share of a core", report.spread(shares, 3)),
            (f"the same, worker to client: p50 ms, {name}", report.spread(p50, 2)),
            (f"the same, worker to client: p99 ms, {name}", report.spread(p99, 2)),
        ]
    for name, rounds in (("with batch", batched), ("without batch", alone)):
        added = [_p99(one) - _p99(least) for one, least in zip(rounds, floor, strict=True)]
        rows.append((f"p99 above the bare relay's, ms, {name}", report.spread(added, 2)))
    return rows


def _p99(one: Mapping[str, Any]) -> float:
    return float(statistics.quantiles(one["delays"], n=100)[98])


if __name__ == "__main__":
    sys.exit(main())
