"""A broker's socket for clients, under the control of a test."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq

from mlxpool.client import AsyncClient, Client, Pace, Stream
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.common.transport import sockets
from support import kinds

PATIENCE = 200  # seconds; no test measures time, so this only bounds a failure
NEVER = 3600.0
USAGE = {"completion_tokens": 0}
FACTS = {"digest": "d", "context": 64, "max_tokens": 9, "prompt_tokens": 3, "now": 5}
# Polls often, and never sends a request again by itself, even on a slow machine.
NO_RESEND_PACE = Pace(ping=0.05, tick=0.01, silence=NEVER, answer=(NEVER,))
WAITS: dict[str, Any] = {"connect_timeout": PATIENCE, "pace": NO_RESEND_PACE}


class FakeBroker:
    """A ROUTER socket under a test's control. Only one thread at a time may use it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.boot = 11
        self.number = 5  # the broker's number of the connection
        self.peer = b""
        self.seen: list[Message] = []
        self.attempts: dict[bytes, int] = {}  # the latest attempt of each stream
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] | None = None

    def open(self) -> FakeBroker:
        self.socket = sockets.router(self.context, sockets.ipc(self.run_dir, "front"))
        return self

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None
        self.context.term()

    def client(self, **options: Any) -> Client:
        """Returns a client that waits for this broker without end, and never retries."""
        return Client(self.run_dir, **{**WAITS, **options})

    def async_client(self, **options: Any) -> AsyncClient:
        """Returns an AsyncClient that waits for this broker without end, and never retries."""
        return AsyncClient(self.run_dir, **{**WAITS, **options})

    def receive(self, kind: str, *, pongs: bool = True) -> Message:
        """Returns the next message of a kind. Answers pings, and records all messages."""
        assert self.socket is not None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if not self.socket.poll(100):
                continue
            self.peer, *parts = self.socket.recv_multipart()
            message = frames.decode(parts)
            self.seen.append(message)
            if message.kind == kinds.PING and pongs:
                with contextlib.suppress(zmq.ZMQError):  # the client may have left by now
                    self.pong()
            if message.kind == kinds.GENERATE and message.header.id is not None:
                self.attempts[message.header.id] = message.header.attempt
            if message.kind == kind:
                return message
        raise AssertionError(f"no {kind} came, only {Counter(self.kinds())}")

    def kinds(self) -> list[str]:
        """Returns the kinds of all messages so far."""
        return [message.kind for message in self.seen]

    def say(
        self,
        kind: str,
        request: bytes | None,
        body: dict[str, Any],
        *blobs: bytes,
        pos: int = 0,
        attempt: int | None = None,
    ) -> None:
        assert self.socket is not None
        if attempt is None:
            attempt = self.attempts.get(request or b"", 0)
        header = Header(kind, request, self.boot, attempt, pos)
        self.socket.send_multipart([self.peer, *frames.encode(header, body, blobs)])

    def pong(self) -> None:
        self.say(kinds.PONG, None, {"boot": self.boot, "link": self.number, "version": 1})

    def accept(self) -> bytes:
        """Accepts the next `generate`; returns its id."""
        request = self.receive(kinds.GENERATE).header.id
        assert request is not None
        self.accepted(request)
        return request

    def stream_of(self, client: Client, prompt: str = "a", **options: Any) -> tuple[Stream, bytes]:
        """Accepts a new stream of a client; returns the stream and its id.

        Opens this broker's socket if it is not open yet.
        """
        stream = client.stream("m", prompt, **options)
        if self.socket is None:
            self.open()
        return stream, self.accept()

    def accepted(self, request: bytes, seed: int = 1, attempt: int | None = None) -> None:
        body = {"boot": self.boot, "link": self.number, "queue_position": 0, "seed": seed}
        self.say(kinds.ACCEPTED, request, body, attempt=attempt)

    def tokens(self, request: bytes, pos: int, count: int = 1, **body: Any) -> None:
        """Sends token ids that equal their positions."""
        ids = range(pos, pos + count)
        fields = {"text": "x" * count, "n": count, **body}
        self.say(kinds.DELTA, request, fields, pack_ids(ids), pos=pos)

    def done(self, request: bytes, pos: int, reason: str = "stop") -> None:
        body = {"text": "", "reason": reason, "usage": USAGE, "timings_ms": {}, "attempts": 1}
        self.say(kinds.DONE, request, body, pos=pos)

    def error(self, request: bytes, code: str, **more: Any) -> None:
        self.say(kinds.ERROR, request, {"code": code, "message": "no", **more})


@contextlib.contextmanager
def fake_broker() -> Iterator[FakeBroker]:
    """Makes a broker with its own run directory; its socket is not open yet."""
    with TemporaryDirectory(prefix="mlxpool-") as folder:  # a short path: socket paths are limited
        broker = FakeBroker(Path(folder))
        try:
            yield broker
        finally:
            broker.close()
