"""What hostile peers do to the delta gaps of a quiet client beside them, in pairs in one run.

    python bench/hostile.py [--rounds 5] [--tokens 1000] [--only NAME] [--json FILE]

One stream of the counting model, 2 ms a token, is read alone and then beside the peer, in turn. A
gap is the time between two deltas in the client's hand. The peer is a process of its own. A busy
neighbour, which burns a processor and knows nothing of the pool, stands first: what it costs is the
machine's share in every other line. The goal is a ratio of at most 2.
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
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from peers import beside, gaps_between
from support.pool import PATIENCE, Pool

MODEL = '[models.m]\npath = "builtin:counting"\n[models.m.counting]\nstep_us = 2000\n'
BATCH = 200  # messages in one write
CROWD = 1000

# ---- the peers, each for ever --------------------------------------------------------------------


def _generate() -> bytes:
    header = Header(kinds.GENERATE, os.urandom(16), 0, 1)
    return message(frames.encode(header, {"model": "nobody", "prompt": "x"}))


def neighbour(endpoint: str) -> None:
    """Burns a processor."""
    while True:
        pass


def flood(make: Callable[[], bytes]) -> Callable[[str], None]:
    """One connection that sends as fast as it can, and reads what comes back."""

    def play(endpoint: str) -> None:
        data = b"".join(make() for _ in range(BATCH))
        while True:
            with RawZmtp(endpoint) as peer:
                peer.greet()
                threading.Thread(target=_drink, args=(peer,), daemon=True).start()
                while peer.send(data):
                    pass

    return play


def _drink(peer: RawZmtp) -> None:
    try:
        while peer.socket.recv(1 << 16):
            pass
    except OSError:
        pass


def unfinished(part: bytes) -> Callable[[str], None]:
    """Parts without end, and again when it is cut."""

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


def million(endpoint: str) -> None:
    """Whole messages, of half a million empty parts each."""
    data = frame(b"", MORE) * 500_000 + frame(b"")
    while True:
        with RawZmtp(endpoint) as peer:
            peer.greet()
            while peer.send(data):
                peer.receive()


def crowd(endpoint: str) -> None:
    """A thousand that connect, say something or half of it, and vanish; again and again."""
    ping = message(frames.encode(Header(kinds.PING)))
    while True:
        peers = [RawZmtp(endpoint).greet() for _ in range(CROWD)]
        for peer, words in zip(peers, itertools.cycle((ping, ping[:-3], b"")), strict=False):
            peer.send(words)
        for peer in peers:
            peer.socket.close()


PEERS: dict[str, Callable[[str], None]] = {
    "busy neighbour": neighbour,
    "pings": flood(lambda: message(frames.encode(Header(kinds.PING)))),
    "unknown models": flood(_generate),
    "garbage": flood(lambda: message([os.urandom(40), os.urandom(40)])),
    "empty frames": flood(lambda: frame(b"")),
    "cancels": flood(lambda: message(frames.encode(Header(kinds.CANCEL, os.urandom(16))))),
    "unfinished, large parts": unfinished(frame(bytes(frames.MAX_FRAME - 64), MORE)),
    "unfinished, empty parts": unfinished(frame(b"", MORE) * 100_000),
    "half a million parts": million,
    "vanishing crowd": crowd,
}

# ---- measuring -----------------------------------------------------------------------------------


def at_work(name: str, endpoint: str) -> AbstractContextManager[None]:
    command = [sys.executable, __file__, "--play", name, "--endpoint", endpoint]
    return beside(name, command, start=0.5)


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
    """All pairs, the table, the verdict."""
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
                with at_work(name, endpoint):
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
