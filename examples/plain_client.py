"""Stream a completion with nothing but pyzmq and msgpack: docs/protocol.md in one short file.

    python examples/plain_client.py RUN_DIR MODEL PROMPT [--max-tokens N] [--seed S]

Prints the text as it arrives, and resumes the stream after a loss of the connection or the broker.
Exit code 0: the completion is complete; 1: it is not, with the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq

PING_INTERVAL = 1.0  # seconds
SILENCE = 3.0  # seconds without any frame before a new connection is tried
GRACE = 60.0  # seconds without any frame before the stream ends
CONNECT_GRACE = 5.0  # the same bound if no broker ever answered
ANSWER_TIMEOUTS = (2.0, 4.0, 8.0)  # seconds, for the first, second and third successive attempt

Socket = zmq.Socket[bytes]


def send(
    socket: Socket, kind: str, ident: bytes | None, attempt: int, body: Any, *blobs: bytes
) -> None:
    """Sends a message: the header [version, kind, id, epoch, attempt, pos], the body, blobs."""
    header = [1, kind, ident, 0, attempt, 0]
    socket.send_multipart([msgpack.packb(header), msgpack.packb(body), *blobs])


@dataclass
class Stream:
    """The state of the stream; `due`: the time of the next attempt."""

    body: dict[str, Any]
    id: bytes = field(default_factory=lambda: os.urandom(16))
    attempt: int = 0
    ids: bytes = b""  # packed, four bytes each
    resume: dict[str, Any] = field(default_factory=dict)  # seed and facts, after acceptance
    home: tuple[int, int] | None = None  # boot and link that accepted the newest attempt
    boot: int = 0  # boot of the broker that last accepted the stream
    sendings: int = 0  # successive attempts without a new id
    barren_boots: int = 0  # successive brokers without a new id
    refused_at: float = math.inf  # time of the first of successive retryable errors
    due: float = 0.0

    def send(self, socket: Socket, now: float) -> None:
        """Sends the next attempt: the request, or a resume from the ids that have arrived."""
        self.attempt, self.home, self.sendings = self.attempt + 1, None, self.sendings + 1
        self.due = now + ANSWER_TIMEOUTS[min(self.sendings, len(ANSWER_TIMEOUTS)) - 1]
        body, blobs = self.body, []
        if self.resume:
            counts = {"count": len(self.ids) // 4, "resumes": self.barren_boots}
            body, blobs = {**body, "resume": {**self.resume, **counts}}, [self.ids]
        send(socket, "generate", self.id, self.attempt, body, *blobs)

    def lost(self, now: float) -> None:
        """Schedules the next attempt: the first two times at once, later with a delay."""
        wait = 0.0 if self.sendings < 3 else ANSWER_TIMEOUTS[-1]
        self.due = min(self.due, now + wait)

    def accepted(self, answer: dict[str, Any]) -> None:
        if self.boot not in (0, answer["boot"]):
            self.barren_boots, self.refused_at = self.barren_boots + 1, math.inf
        self.home, self.boot = (answer["boot"], answer["link"]), answer["boot"]
        self.resume["seed"], self.due = answer["seed"], math.inf

    def error(self, answer: dict[str, Any], now: float) -> str | None:
        """Handles an error. Returns the reason for the end, or None for a retry."""
        known = self.attempt > 1 or (answer["code"] == "draining" and self.boot)
        wait = (answer.get("retry_after_ms") or 0) / 1000
        self.refused_at = min(self.refused_at, now)
        if not known or not wait or now + wait > self.refused_at + GRACE:
            return f"{answer['code']}: {answer['message']}"
        self.home, self.due = None, now + wait
        return None

    def take(self, answer: dict[str, Any], ids: bytes) -> None:
        """Adds the new ids of an answer."""
        self.ids += ids
        self.sendings, self.barren_boots, self.refused_at = 0, 0, math.inf
        if answer.get("facts"):
            self.resume.setdefault("facts", answer["facts"])


def handle(stream: Stream, socket: Socket, parts: list[bytes], now: float) -> str | None:
    """Handles a frame. Returns None if the stream continues, "" at its end, or its error."""
    _, kind, ident, _, attempt, pos, *_ = msgpack.unpackb(parts[0])
    answer = msgpack.unpackb(parts[1]) if len(parts) > 1 else {}
    if kind == "pong" and stream.home not in (None, (answer["boot"], answer["link"])):
        stream.lost(now)
    if kind == "error" and ident is None and answer.get("about") == stream.id:
        ours = attempt == stream.attempt and answer["code"] == "duplicate_id"
        return f"{answer['code']}: {answer['message']}" if ours or not stream.boot else None
    if ident != stream.id or attempt not in (stream.attempt, 0):
        return None  # a frame of another stream, or of another attempt
    if kind == "error":
        return stream.error(answer, now)
    if kind == "accepted":
        stream.accepted(answer)
    elif kind in ("delta", "done") and stream.home and pos != len(stream.ids) // 4:
        stream.lost(now)
    elif kind in ("delta", "done") and stream.home:
        print(answer["text"], end="\n" if kind == "done" else "", flush=True)
        if kind == "done":
            return "cancelled" if answer["reason"] == "cancelled" else ""
        stream.take(answer, parts[2])
        send(socket, "ack", None, 0, {"have": [[stream.id, len(stream.ids) // 4]]})
    return None


def run(context: zmq.Context[Socket], endpoint: str, stream: Stream) -> str:
    """Prints the completion. Returns "", or the reason why it is not complete."""
    socket: Socket | None = None
    before = heard_at = time.monotonic()
    fresh_at = ping_at = -math.inf
    grace = CONNECT_GRACE
    try:
        while (now := time.monotonic()) - heard_at < grace:
            if now - before > 1:  # this process was stopped, so the broker was not silent
                heard_at += now - before
            before = now
            if now - max(heard_at, fresh_at) > SILENCE or socket is None:
                if socket is not None:
                    socket.close(linger=0)
                socket = context.socket(zmq.DEALER)
                socket.connect(endpoint)
                fresh_at, stream.due = now, now
            if now >= stream.due:
                stream.send(socket, now)
            if now - ping_at >= PING_INTERVAL:
                ping_at = now
                send(socket, "ping", None, 0, {})
            if socket.poll(100):
                heard_at, grace = now, GRACE
                ended = handle(stream, socket, socket.recv_multipart(), now)
                if ended is not None:
                    return ended
        return f"no broker answers at {endpoint} for {grace:g} s"
    finally:
        if socket is not None:
            socket.close(linger=0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a completion from an mlxpool broker.")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=-1, help="below 0: the broker draws one")
    options_given = parser.parse_args()
    options = {"max_tokens": options_given.max_tokens, "seed": options_given.seed}
    stream = Stream(
        {"model": options_given.model, "prompt": options_given.prompt, "options": options}
    )
    context: zmq.Context[Socket] = zmq.Context()
    try:
        why = run(context, f"ipc://{os.path.abspath(options_given.run_dir)}/front.ipc", stream)
    finally:
        context.term()
    if why:
        print(f"\n{why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
