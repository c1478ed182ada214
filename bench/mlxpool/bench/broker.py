"""The broker without a model: what does it cost, compared with a bare relay of the same frames?

A worker without a model (firehose.py) sends tokens to clients that only count them. The broker is
compared with a relay (relay.py) that only forwards frames.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import psutil
import zmq
from msgspec import Struct, field

from mlxpool.bench.measurement import OURS, Measurement, Progress, percentile
from mlxpool.bench.pools import MODEL, serving, started, temporary_run_dir, toml_of
from mlxpool.bench.traffic.firehose import Flood, environment
from mlxpool.common.protocol import frames, from_client, to_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets

TOKEN_TIMEOUT_MS = 60_000
PING_INTERVAL = 1.0  # seconds
MAX_READS = 1000
RELAY = "bare relay"
# The one worker of the model has room for all streams.
SETTINGS = toml_of({"path": "builtin:counting", "sequences": 4096}, {"beat_limit": 1000})
SINGLE = Flood(streams=16, rows=1, tokens=4000)
BATCHED = Flood(streams=16, rows=16, tokens=60_000)


class Cost(Struct, frozen=True):
    """The cost of one round of token traffic, and the delays of its tokens.

    `per_s`: tokens/s. `cpu_us`: microseconds of processor time per token. `share`: processor time
    as a fraction of the round's duration; 1 is one busy core.
    """

    per_s: float
    cpu_us: float
    share: float
    delays_ms: Sequence[float]

    def delay(self, percent: float) -> float:
        """Returns a percentile of the tokens' delays between worker and client, in ms."""
        return percentile(self.delays_ms, percent)


class CountingClient:
    """A client that starts streams and counts the arriving token ids."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = sockets.dealer(context, endpoint)
        self.ids = 0
        self.ended = 0
        self.delays: list[float] = []
        self._ping_at = math.inf  # monotonic seconds

    def ask(self, streams: int, tokens: int, *, batch: bool) -> None:
        for _ in range(streams):
            body = {
                "model": MODEL, "prompt": "x", "batch": batch, "window": 1 << 20,
                "options": {"max_tokens": tokens},
            }  # fmt: skip
            header = Header(from_client.Generate.kind, os.urandom(16), 0, 1)
            self.socket.send_multipart(frames.encode(header, body))
        self._ping_at = time.monotonic() + PING_INTERVAL

    def ping_if_due(self) -> None:
        """Sends a ping once a second: a broker cancels the streams of a silent client."""
        if (now := time.monotonic()) >= self._ping_at:
            self._ping_at = now + PING_INTERVAL
            self.socket.send_multipart(frames.encode(Header(from_client.Ping.kind)))

    def read(self, *, delays: bool) -> None:
        """Reads at most MAX_READS arrived messages, so that other clients are read, too."""
        for _ in range(MAX_READS):
            if not self.read_one(delays=delays):
                return

    def read_one(self, *, delays: bool) -> bool:
        """Reads one message; returns False if no message has arrived."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(parts) > 2:
            self.ids += len(parts[2]) // 4
            if delays:
                self._add_delays(frames.decode(parts))
        elif frames.decode(parts).kind in (to_client.Done.kind, to_client.Failed.kind):
            self.ended += 1
        return True

    def _add_delays(self, message: frames.Message) -> None:
        now = time.monotonic_ns()
        texts = [row[3] for row in message.body.get("rows", [])] or [message.body["text"]]
        self.delays += [(now - int(stamp)) / 1e6 for text in texts for stamp in text.split()]


def through_broker(flood: Flood, clients: int, *, batch: bool, delays: bool = False) -> Cost:
    """Measures one round of traffic through the broker.

    `batch`: each frame carries tokens of all streams of its client, instead of one stream.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_run_dir())
        broker = stack.enter_context(serving(folder, SETTINGS, environment(folder, flood)))
        counters = stack.enter_context(_counters(sockets.ipc(folder, "front"), clients))
        for counter in counters:
            counter.ask(flood.streams // clients, flood.tokens, batch=batch)

        def finished() -> bool:
            return sum(counter.ended for counter in counters) >= flood.streams

        return _cost(counters, finished, broker.pid, delays=delays)


def through_relay(flood: Flood, *, delays: bool = False) -> Cost:
    """Runs a round through the bare relay, which forwards the worker's frames unchanged."""
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_run_dir())
        front, back = f"ipc://{folder}/front", f"ipc://{folder}/back"
        python = [sys.executable, "-P", "-m"]
        command = [*python, "mlxpool.bench.traffic.relay", front, back]
        relay = stack.enter_context(started(command, folder / "relay.log"))
        counters = stack.enter_context(_counters(front, 1))
        counters[0].socket.send(b"hello")
        command = [*python, "mlxpool.bench.traffic.firehose", back]
        stack.enter_context(started(command, folder / "talker.log", environment(folder, flood)))

        def arrived() -> bool:
            return counters[0].ids >= flood.streams * flood.tokens

        return _cost(counters, arrived, relay.pid, delays=delays)


@contextmanager
def _counters(endpoint: str, count: int) -> Iterator[list[CountingClient]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    counters = [CountingClient(context, endpoint) for _ in range(count)]
    try:
        yield counters
    finally:
        context.destroy(linger=0)


def _cost(
    counters: Sequence[CountingClient], finished: Callable[[], bool], pid: int, *, delays: bool
) -> Cost:
    """Measures the cost from the first message with a token to the end of the round."""
    poller = zmq.Poller()
    for counter in counters:
        poller.register(counter.socket, zmq.POLLIN)
    process = psutil.Process(pid)
    _read_until(lambda: any(counter.ids for counter in counters), counters, poller, _read_first)
    start, before, first_ids = (
        time.monotonic(),
        process.cpu_times(),
        sum(counter.ids for counter in counters),
    )
    _read_until(finished, counters, poller, partial(CountingClient.read, delays=delays))
    seconds, after = time.monotonic() - start, process.cpu_times()
    ids = sum(counter.ids for counter in counters) - first_ids
    if not ids:
        raise SystemExit(f"all {first_ids} tokens came in one message; measure with more")
    cpu = (after.user - before.user) + (after.system - before.system)
    waits = [delay for counter in counters for delay in counter.delays]
    return Cost(ids / seconds, cpu / ids * 1e6, cpu / seconds, waits)


def _read_first(counter: CountingClient) -> None:
    """Reads only the first message: later messages are part of the measurement."""
    counter.read_one(delays=False)


def _read_until(
    finished: Callable[[], bool],
    counters: Sequence[CountingClient],
    poller: zmq.Poller,
    read: Callable[[CountingClient], None],
) -> None:
    while not finished():
        if not poller.poll(TOKEN_TIMEOUT_MS):
            total = sum(counter.ids for counter in counters)
            raise SystemExit(
                f"no token came for {TOKEN_TIMEOUT_MS // 1000} s; {total:,} had come before"
            )
        for counter in counters:
            read(counter)
            counter.ping_if_due()


# ---- tables --------------------------------------------------------------------------------------


class Rounds(Struct):
    """The costs of all rounds with the same traffic, by contestant."""

    found: dict[str, list[Cost]] = field(default_factory=dict)

    def add(self, name: str, cost: Cost) -> None:
        self.found.setdefault(name, []).append(cost)

    def of(self, figure: Callable[[Cost], float]) -> dict[str, tuple[float, ...]]:
        return {name: tuple(map(figure, costs)) for name, costs in self.found.items()}


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    return f"No model; {options.rounds} rounds."


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields each measurement when it is complete."""
    # 50 streams of 100 tokens/s each
    flood = Flood(streams=50, rows=50, tokens=int(100 * options.seconds), rate=100)
    peers = not options.no_peers
    single, batched, paced, alone = Rounds(), Rounds(), Rounds(), Rounds()
    for number in range(options.rounds):
        progress(f"as fast as it goes, round {number + 1} of {options.rounds}")
        single.add(OURS, through_broker(SINGLE, 1, batch=False))
        if peers:
            single.add(RELAY, through_relay(SINGLE))
        batched.add(OURS, through_broker(BATCHED, 4, batch=True))
    for number in range(options.rounds):
        progress(f"at a pace, round {number + 1} of {options.rounds}")
        paced.add(OURS, through_broker(flood, 2, batch=True, delays=True))
        alone.add(OURS, through_broker(flood, 2, batch=False, delays=True))
        if peers:
            relayed = through_relay(flood, delays=True)
            paced.add(RELAY, relayed)
            alone.add(RELAY, relayed)
    for name, unit, rounds in (
        ("one row a frame", "worker frames/s", single),
        ("16 rows a frame, 4 clients", "tokens/s", batched),
    ):
        yield Measurement("broker", name, unit, rounds.of(lambda cost: cost.per_s), digits=0)
        row = ("processor time", name.partition(",")[0], "us a token")
        yield _lower(*row, rounds.of(lambda cost: cost.cpu_us))
    for name, rounds in (("batch", paced), ("no batch", alone)):
        group = "50 streams of 100 tokens/s"
        yield _lower(group, name, "share of a core", rounds.of(lambda cost: cost.share))
        for percent in (50, 99):
            delays = rounds.of(partial(Cost.delay, percent=percent))
            yield _lower(f"{group}, worker to client", f"{name}, p{percent}", "ms", delays)


def _lower(group: str, name: str, unit: str, sides: dict[str, tuple[float, ...]]) -> Measurement:
    return Measurement(group, name, unit, sides, less_is_better=True, digits=3)
