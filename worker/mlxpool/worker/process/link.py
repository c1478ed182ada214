"""The worker's link to its broker: socket, hello, epoch, and unsent frames.

A frame belongs to the epoch in which it was made. If the epoch ends, unsent frames are dropped,
because the broker gives the requests of the old epoch to other workers.
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

SEND_RETRY_DELAY = 0.01  # seconds until a retry with a full socket
MIN_HELLO_INTERVAL = 1.0  # seconds between two hellos
SILENCE_LIMIT = 5.0  # seconds of counted time; a running broker sends a frame within this time
MAX_COUNTED_TURN = 2.0  # the most counted seconds of one loop iteration
NEVER = float("inf")


class Silence(Struct):
    """The time since the broker's last frame, in seconds of counted time.

    Time counts only while the main loop runs: a stopped worker cannot receive frames.
    """

    since_dialled: float = 0.0  # since the last frame or the last dial
    since_heard: float = 0.0  # since the last frame
    turned_at: float = 0.0

    def turn(self, now: float) -> bool:
        """Counts one iteration of the loop. Returns whether the broker has been silent too long."""
        passed = min(now - self.turned_at, MAX_COUNTED_TURN) if self.turned_at else 0.0
        self.since_dialled += passed
        self.since_heard += passed
        self.turned_at = now
        return self.since_dialled >= SILENCE_LIMIT

    def dialled(self) -> None:
        """Restarts the measurement of the broker's silence for a new connection."""
        self.since_dialled = 0.0

    def heard(self) -> None:
        """Records that a frame has arrived."""
        self.since_dialled = self.since_heard = 0.0


class Link:
    """The link to the broker, used by the main thread. `epoch` 0: before the first welcome."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        history: History,
        credentials: Credentials | None = None,
    ) -> None:
        """`token` admits the first hello; each welcome has a new token."""
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
        """Whether a hello was sent, even if the broker has not received it."""
        return self._hello is not None

    def introduce(self, hello: Hello, now: float) -> None:
        """Sends hello now and whenever it is needed again, with the newest token."""
        self._hello = hello
        self.silence.heard()
        self._send_hello(now)

    def lose_epoch(self, now: float) -> bool:
        """Handles `who`: the broker does not know this connection. Returns whether an epoch ended.

        `send_due_hello` sends the hello, not sooner than MIN_HELLO_INTERVAL after the last hello.
        Another `who` before the welcome changes nothing.
        """
        had, self.epoch = self.epoch, 0
        if self.introduced:
            self._hello_due = max(now, self._hello_at + MIN_HELLO_INTERVAL)
        return bool(had)

    def send_due_hello(self, now: float) -> None:
        """Sends a due hello; called once per loop iteration, after all frames were read."""
        if now >= self._hello_due:
            self._send_hello(now)

    def redial(self, now: float) -> bool:
        """Replaces a silent connection. Returns whether an epoch ended with it."""
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
        """Handles the broker's answer to hello. Returns whether the epoch is new."""
        if welcome.token is not None:
            self.token = welcome.token
        if epoch == self.epoch:
            return False
        self.unsent.clear()
        self.epoch, self._hello_due = epoch, NEVER
        self.history.write("welcome", epoch=epoch)
        return True

    def silent_too_long(self, now: float) -> bool:
        """Returns True if the connection must be replaced, because the broker was silent too long.

        Called once per loop iteration, after all frames were read.
        """
        too_long = self.silence.turn(now)
        return too_long and self.introduced

    def alone_too_long(self, limit: float) -> bool:
        """Returns whether a hello was sent, and no frame has arrived for `limit` counted seconds.

        Seconds are counted only while the main loop runs, see Silence.
        """
        return self.introduced and self.silence.since_heard >= limit

    # ---- frames --------------------------------------------------------------------------------

    def send(self, content: Content, id: bytes | None = None) -> None:
        """Sends a message; does nothing without an epoch. Raises TooLarge."""
        if self.epoch:
            self.put(encoded(content, id, self.epoch, max_body=MAX_BACK_BODY))

    def send_deltas(self, deltas: Sequence[Delta]) -> None:
        """Sends deltas, in several messages if necessary, or nothing without an epoch.

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
        """Enqueues the message parts of the frame that has these deltas."""
        self.put(parts)

    def _write_delta(self, delta: Delta) -> None:
        end = delta.end and (delta.end.get("code") or delta.end.get("reason"))
        id, attempt, pos, n = delta.id, delta.attempt, delta.pos, delta.n
        self.history.write("deltas", id=id, attempt=attempt, pos=pos, n=n, end=end)

    def put(self, parts: list[bytes]) -> None:
        """Enqueues a frame, given as its message parts."""
        self.unsent.append(parts)

    def flush(self) -> None:
        """Sends the frames that the socket takes now."""
        while self.unsent:
            try:
                self.socket.send_multipart(self.unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.unsent.popleft()

    def receive(self) -> Message | None:
        """Returns the next well-formed message; None if no message has arrived."""
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
        """Returns the time of the next hello, or of the next try to send frames.

        The time is in monotonic seconds.
        """
        return min(self._hello_due, now + SEND_RETRY_DELAY if self.unsent else NEVER)

    def close(self) -> None:
        """Sends as many frames as the socket takes, then closes it."""
        self.flush()
        self.handshake.close()
        self.socket.close()
        self.context.term()
