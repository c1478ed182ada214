"""The worker's link to its broker: socket, hello, epoch, and the frames still to be sent.

A frame belongs to the epoch it was made in. With a new epoch, or without any, unsent frames are
dropped, because the broker gives the requests of the old epoch to other workers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import zmq
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import PoolError, TooLarge
from mlxpool.common.protocol.deltas import Delta, Deltas
from mlxpool.common.protocol.frames import (
    MAX_BACK_BODY,
    Content,
    Message,
    decode,
    encoded,
)
from mlxpool.common.protocol.from_worker import Hello
from mlxpool.common.protocol.to_worker import Welcome
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials

log = logging.getLogger("mlxpool.worker")

SEND_RETRY_DELAY = 0.01  # seconds until a full socket is tried again
MIN_HELLO_INTERVAL = 1.0  # seconds between two hellos
SILENCE_LIMIT = 5.0  # seconds of counted time in which a living broker sends something
MAX_COUNTED_TURN = 2.0  # seconds that one turn of the loop counts at most
NEVER = float("inf")


class Silence(Struct):
    """How long the broker has sent nothing, in seconds of counted time.

    Time counts only while the loop turns: a worker that was stopped did not listen.
    """

    since_dialled: float = 0.0  # since a frame came or the broker was dialled again
    since_heard: float = 0.0  # since a frame came
    turned_at: float = 0.0

    def turn(self, now: float) -> bool:
        """Count one turn of the loop. Returns whether the broker has been silent for too long."""
        passed = min(now - self.turned_at, MAX_COUNTED_TURN) if self.turned_at else 0.0
        self.since_dialled += passed
        self.since_heard += passed
        self.turned_at = now
        return self.since_dialled >= SILENCE_LIMIT

    def dialled(self) -> None:
        """Give the broker time to answer on a new connection."""
        self.since_dialled = 0.0

    def heard(self) -> None:
        """A frame has come."""
        self.since_dialled = self.since_heard = 0.0


class Link:
    """Belongs to the main thread. `epoch` 0: there was no welcome yet."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        history: History,
        credentials: Credentials | None = None,
    ) -> None:
        """`token` admits the first hello; each welcome brings a new one."""
        self.endpoint = endpoint
        self.credentials = credentials
        self.history = history
        self.token = token
        self.epoch = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dial()
        self.silence = Silence()
        self.unsent: deque[list[bytes]] = deque()
        self._hello: Hello | None = None
        self._hello_at = 0.0
        self._hello_due = NEVER

    def _dial(self) -> None:
        self.socket = sockets.dealer(self.context, self.endpoint, self.credentials)
        self.handshake = Handshake(self.socket, self.endpoint, self.credentials)

    # ---- hello and welcome ---------------------------------------------------------------------

    @property
    def introduced(self) -> bool:
        """Whether a hello was sent, received or not."""
        return self._hello is not None

    def introduce(self, hello: Hello, now: float) -> None:
        """Send hello, now and whenever it is needed again; each with the newest token."""
        self._hello = hello
        self.silence.heard()
        self._send_hello(now)

    def lose_epoch(self, now: float) -> bool:
        """Answer `who`: the broker does not know this connection. Returns whether an epoch ended.

        `send_due_hello` sends the hello, not sooner than MIN_HELLO_INTERVAL after the last one. A
        further `who` before the welcome changes nothing.
        """
        had, self.epoch = self.epoch, 0
        if self.introduced:
            self._hello_due = max(now, self._hello_at + MIN_HELLO_INTERVAL)
        return bool(had)

    def send_due_hello(self, now: float) -> None:
        """Send the hello that is due; called once a turn, after everything was read."""
        if now >= self._hello_due:
            self._send_hello(now)

    def redial(self, now: float) -> bool:
        """Replace a connection that has gone silent. Returns whether an epoch ended with it."""
        had, self.epoch = self.epoch, 0
        self.handshake.close()
        self.socket.close(linger=0)
        self._dial()
        self.silence.dialled()
        self._send_hello(now)
        return bool(had)

    def _send_hello(self, now: float) -> None:
        self.unsent.clear()
        if self._hello is not None:
            self._hello_at, self._hello_due = now, NEVER
            self.put(encoded(replace(self._hello, token=self.token)))
            self.history.write("hello")

    def welcome(self, epoch: int, welcome: Welcome) -> bool:
        """Take the broker's answer to hello. Returns whether the epoch is a new one."""
        if welcome.token is not None:
            self.token = welcome.token
        if epoch == self.epoch:
            return False
        self.unsent.clear()
        self.epoch, self._hello_due = epoch, NEVER
        self.history.write("welcome", epoch=epoch)
        return True

    def silent_too_long(self, now: float) -> bool:
        """Whether to replace the connection; called once a turn, after the socket was read."""
        too_long = self.silence.turn(now)
        return too_long and self.introduced

    def alone_too_long(self, limit: float) -> bool:
        """Whether no frame came for `limit` seconds of counted time, though hello was sent."""
        return self.introduced and self.silence.since_heard >= limit

    # ---- frames --------------------------------------------------------------------------------

    def send(self, content: Content, id: bytes | None = None) -> None:
        """Send a message; without an epoch, nothing: it would be ignored. Raises TooLarge."""
        if self.epoch:
            self.put(encoded(content, id, self.epoch, max_body=MAX_BACK_BODY))

    def send_deltas(self, deltas: Sequence[Delta]) -> None:
        """Send deltas, in several messages if need be; without an epoch, nothing.

        Raises TooLarge for a delta that no message can hold.
        """
        if not self.epoch:
            return
        try:
            parts = encoded(Deltas(deltas), epoch=self.epoch, max_body=MAX_BACK_BODY)
        except TooLarge:
            if len(deltas) == 1:
                raise
            half = len(deltas) // 2
            self.send_deltas(deltas[:half])
            self.send_deltas(deltas[half:])
            return
        if self.history.on:
            for delta in deltas:
                self._write_delta(delta)
        self.put_deltas(deltas, parts)

    def put_deltas(self, deltas: Sequence[Delta], parts: list[bytes]) -> None:
        """Enqueue the frame of these deltas."""
        self.put(parts)

    def _write_delta(self, one: Delta) -> None:
        end = one.end and (one.end.get("code") or one.end.get("reason"))
        self.history.write("deltas", id=one.id, attempt=one.attempt, pos=one.pos, n=one.n, end=end)

    def put(self, parts: list[bytes]) -> None:
        """Enqueue a frame."""
        self.unsent.append(parts)

    def flush(self) -> None:
        """Send the frames that the socket takes now."""
        while self.unsent:
            try:
                self.socket.send_multipart(self.unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.unsent.popleft()

    def receive(self) -> Message | None:
        """Returns the next well-formed message; None when none is there now."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self.silence.heard()
            try:
                return decode(parts, max_body=MAX_BACK_BODY)
            except PoolError as error:
                log.warning("bad frame from the broker", extra={"why": str(error)})

    def next_wake(self, now: float) -> float:
        """When `send_due_hello` or `flush` has something to do; monotonic seconds."""
        return min(self._hello_due, now + SEND_RETRY_DELAY if self.unsent else NEVER)

    def close(self) -> None:
        """Send what the socket takes and close it."""
        self.flush()
        self.handshake.close()
        self.socket.close()
        self.context.term()
