"""Measures the gaps between deltas of a quiet client while a hostile peer attacks the broker.

    python bench/hostile_peers.py [--rounds 5] [--tokens 1000] [--only NAME] [--json FILE]

One stream of the counting model, 2 ms a token, is read alone and then beside the peer, alternately.
A gap is the time between two deltas at the client. Each peer is a process of its own. The first one
is a control: it only loads a processor, so its ratio is the machine's part of the other ratios. The
goal is a ratio of at most 2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil

from chaos.raw_zmtp import MORE, RawZmtp, frame, message
from mlxpool.bench import report
from mlxpool.client import Client
from mlxpool.common.protocol import frames, from_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from peer_process import gaps_between, running
from support.pool import PATIENCE, Pool

MODEL = """\
[models.m]
path = "builtin:counting"
[models.m.counting]
step_us = 2000
[models.unread]
path = "builtin:counting"
sequences = 256
[models.unread.counting]
step_us = 50000
"""
MESSAGES_PER_WRITE = 200
CROWD_SIZE = 1000  # connections
DEAF_SIZE = 200  # connections that read nothing
FILLING = 8000  # pings whose answers fill such a connection, and its queue in libzmq

# ---- the peers; none returns ---------------------------------------------------------------------


def _generate() -> bytes:
    header = Header(from_client.Generate.kind, os.urandom(16), 0, 1)
    return message(frames.encode(header, {"model": "nobody", "prompt": "x"}))


def neighbour(endpoint: str) -> None:
    """Load one processor."""
    while True:
        pass


def flood(make: Callable[[], bytes]) -> Callable[[str], None]:
    """One connection that sends as fast as it can and reads the answers."""

    def play(endpoint: str) -> None:
        data = b"".join(make() for _ in range(MESSAGES_PER_WRITE))
        while True:
            with RawZmtp(endpoint) as peer:
                peer.greet()
                threading.Thread(target=_discard_input, args=(peer,), daemon=True).start()
                while peer.send(data):
                    pass

    return play


def _discard_input(peer: RawZmtp) -> None:
    try:
        while peer.socket.recv(1 << 16):
            pass
    except OSError:
        pass


def unfinished(part: bytes) -> Callable[[str], None]:
    """Send parts of a message that never ends; connect again when disconnected."""

    def play(endpoint: str) -> None:
        while True:
            try:
                with RawZmtp(endpoint) as peer:
                    peer.greet()
                    while peer.send(part):
                        pass
            except (OSError, EOFError, AssertionError):
                time.sleep(0.01)

    return play


def many_parts(endpoint: str) -> None:
    """Send whole messages of half a million empty parts each."""
    data = frame(b"", MORE) * 500_000 + frame(b"")
    while True:
        with RawZmtp(endpoint) as peer:
            peer.greet()
            while peer.send(data):
                peer.receive()


def crowd(endpoint: str) -> None:
    """Open a thousand connections, send a message or a part of one on each, close them; repeat."""
    ping = message(frames.encode(Header(from_client.Ping.kind)))
    while True:
        peers = [RawZmtp(endpoint).greet() for _ in range(CROWD_SIZE)]
        for peer, data in zip(peers, itertools.cycle((ping, ping[:-3], b"")), strict=False):
            peer.send(data)
        for peer in peers:
            peer.socket.close()


def deaf(streams: int) -> Callable[[str], None]:
    """DEAF_SIZE connections that fill up with answers, then start streams, and read nothing.

    They ping once a second, so that the broker takes them for alive, and acknowledge nothing.
    """

    def play(endpoint: str) -> None:
        ping = message(frames.encode(Header(from_client.Ping.kind)))
        peers = [RawZmtp(endpoint).greet() for _ in range(DEAF_SIZE)]
        unsent = {}
        for peer in peers:
            peer.socket.setblocking(False)
            asked = b"".join(_unread_stream() for _ in range(streams))
            unsent[peer] = memoryview(ping * FILLING + asked)
        due = time.monotonic()
        while True:
            for peer, data in list(unsent.items()):
                unsent[peer] = data[_send_some(peer, data) :]
                if not unsent[peer]:
                    del unsent[peer]
            if not unsent and time.monotonic() >= due:
                due = time.monotonic() + 1.0
                unsent = {peer: memoryview(ping) for peer in peers}
            time.sleep(0.005)

    return play


def _unread_stream() -> bytes:
    header = Header(from_client.Generate.kind, os.urandom(16), 0, 1)
    body = {"model": "unread", "prompt": "x", "window": 1 << 20}
    return message(frames.encode(header, {**body, "options": {"max_tokens": 1_000_000}}))


def _send_some(peer: RawZmtp, data: memoryview) -> int:
    """How many bytes the connection took; all, if it has ended."""
    try:
        return peer.socket.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


PEERS: dict[str, Callable[[str], None]] = {
    "busy neighbour": neighbour,
    "pings": flood(lambda: message(frames.encode(Header(from_client.Ping.kind)))),
    "unknown models": flood(_generate),
    "garbage": flood(lambda: message([os.urandom(40), os.urandom(40)])),
    "empty frames": flood(lambda: frame(b"")),
    "cancels": flood(
        lambda: message(frames.encode(Header(from_client.Cancel.kind, os.urandom(16))))
    ),
    "unfinished, large parts": unfinished(frame(bytes(frames.MAX_FRAME - 64), MORE)),
    "unfinished, empty parts": unfinished(frame(b"", MORE) * 100_000),
    "half a million parts": many_parts,
    "vanishing crowd": crowd,
    "a crowd that never reads": deaf(0),
    "the same with streams": deaf(1),
}
STARTS = {"a crowd that never reads": 20.0, "the same with streams": 20.0}  # s until all are full

# ---- measuring -----------------------------------------------------------------------------------


def running_peer(name: str, endpoint: str) -> AbstractContextManager[None]:
    command = [sys.executable, __file__, "--play", name, "--endpoint", endpoint]
    return running(name, command, start=STARTS.get(name, 0.5))


def gaps(client: Client, tokens: int) -> list[float]:
    """Milliseconds between the deltas of one stream."""
    with client.stream("m", "quiet", max_tokens=tokens, seed=1) as stream:
        return gaps_between(stream)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--only", choices=PEERS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        PEERS[options.play](options.endpoint)
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), MODEL) as pool:
        measure(pool, options)


def measure(pool: Pool, options: argparse.Namespace) -> None:
    """Measure all pairs and print the table."""
    assert pool.process is not None
    broker = psutil.Process(pool.process.pid)
    endpoint = sockets.ipc(pool.run_dir, "front")
    rows, figures = [], {}
    with pool.client(connect_timeout=PATIENCE) as client:
        gaps(client, 100)
        for name in [options.only] if options.only else PEERS:
            quiet, loud, peak = [], [], 0.0
            for _ in range(options.rounds):
                quiet.append(p99(gaps(client, options.tokens)))
                with running_peer(name, endpoint):
                    loud.append(p99(gaps(client, options.tokens)))
                    peak = max(peak, broker.memory_info().rss / 1e6)
            ratios = [b / a for a, b in zip(quiet, loud, strict=True)]
            figures[name] = {"quiet_ms": quiet, "beside_ms": loud, "rss_mb": peak}
            cells = (report.spread(quiet, 2), report.spread(loud, 2), report.spread(ratios, 2))
            rows.append((name, *cells, f"{peak:.0f}"))
            print(f"{name}: {cells[2]}", file=sys.stderr, flush=True)
    print(f"{report.versions()}; {report.machine()}")
    print(f"{options.tokens} tokens, {options.rounds} rounds: median (minimum - maximum)\n")
    head = ("beside the stream", "alone, p99 ms", "beside it, p99 ms", "ratio", "broker, MB")
    print(report.table(head, rows))
    report.save(options.json, figures)


if __name__ == "__main__":
    main()
