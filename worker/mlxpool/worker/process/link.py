"""The worker's link to its broker: socket, hello, epoch, and what is still to be sent.

A frame belongs to the epoch it was made in: with a new one, or without any, what is unsent is
dropped, for the broker gives the requests of the old one to somebody else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials

log = logging.getLogger("mlxpool.worker")

RETRY = 0.01  # seconds, to a socket that takes nothing now
HELLO_AGAIN = 1.0  # seconds between two hellos at least
HEARD_LIMIT = 5.0  # seconds of our own time in which a broker that lives says something
NEVER = float("inf")
LONGEST_TURN = 2.0  # seconds that one turn of the edge's loop counts for at most


@dataclass(slots=True)
class Silence:
    """How long the broker has been silent, in time in which we could have heard it."""

    seconds: float = 0.0  # since we heard it, or called it anew
    alone: float = 0.0  # since we heard it
    turned: float = 0.0

    def turn(self, now: float) -> bool:
        """One more turn of the loop, after everything was read: whether it is too long."""
        passed = min(now - self.turned, LONGEST_TURN) if self.turned else 0.0
        self.seconds += passed
        self.alone += passed
        self.turned = now
        return self.seconds >= HEARD_LIMIT

    def called(self) -> None:
        """It is given time to answer."""
        self.seconds = 0.0

    def heard(self) -> None:
        self.seconds = self.alone = 0.0


class Link:
    """Lives in the edge's thread. `epoch` 0: no welcome yet."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        history: History,
        credentials: Credentials | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self.history = history
        self.token = token  # the newest that the broker gave
        self.epoch = 0
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dial()
        self.silence = Silence()
        self.unsent: deque[list[bytes]] = deque()
        self._hello: Mapping[str, Any] | None = None
        self._hello_at = 0.0
        self._hello_due = NEVER

    def _dial(self) -> None:
        self.socket = sockets.dealer(self.context, self.endpoint, self.credentials)
        self.handshake = Handshake(self.socket, self.endpoint, self.credentials)

    # ---- hello and its answers -----------------------------------------------------------------

    @property
    def introduced(self) -> bool:
        """Whether the broker has been told who we are, if it got it."""
        return self._hello is not None

    def introduce(self, hello: Mapping[str, Any], now: float) -> None:
        """Say hello, now and whenever it has to be said again. `token` is added here."""
        self._hello = hello
        self.silence.heard()
        self._say_hello(now)

    def again(self, now: float) -> bool:
        """`who`: the broker does not know this connection. Whether an epoch has ended by it.

        Hello follows in `turn`; a further `who` before it is answered changes nothing.
        """
        had, self.epoch = self.epoch, 0
        if self.introduced:
            self._hello_due = max(now, self._hello_at + HELLO_AGAIN)
        return bool(had)

    def turn(self, now: float) -> None:
        """One turn of the edge's loop, after everything was read."""
        if now >= self._hello_due:
            self._say_hello(now)

    def redial(self, now: float) -> bool:
        """A new connection, the old one having gone silent. Whether an epoch has ended by it."""
        had, self.epoch = self.epoch, 0
        self.handshake.close()
        self.socket.close(linger=0)
        self._dial()
        self.silence.called()
        self._say_hello(now)
        return bool(had)

    def _say_hello(self, now: float) -> None:
        self.unsent.clear()
        if self._hello is not None:
            self._hello_at, self._hello_due = now, NEVER
            body = {**self._hello, "token": self.token}
            self.put(frames.encode(Header(kinds.HELLO), body))
            self.history.write("hello")

    def welcome(self, message: Message) -> bool:
        """The broker's answer to hello: whether it gives a new epoch."""
        epoch, token = message.header.epoch, message.body.get("token")
        if isinstance(token, str):
            self.token = token
        if epoch == self.epoch:
            return False
        self.unsent.clear()
        self.epoch, self._hello_due = epoch, NEVER
        self.history.write("welcome", epoch=epoch)
        return True

    def silent_too_long(self, now: float) -> bool:
        """Asked once a turn, after the socket was read."""
        too_long = self.silence.turn(now)
        return too_long and self.introduced

    def alone_too_long(self, limit: float) -> bool:
        """Whether nothing was heard for so many seconds of our own time, though we have called."""
        return self.introduced and self.silence.alone >= limit

    # ---- frames --------------------------------------------------------------------------------

    def frame(
        self,
        kind: str,
        body: Mapping[str, Any],
        *,
        id: bytes | None = None,
        blobs: tuple[bytes, ...] = (),
        epoch: int | None = None,
    ) -> list[bytes]:
        """A message of this epoch. Raises TooLarge."""
        header = Header(kind, id, self.epoch if epoch is None else epoch)
        return frames.encode(header, body, blobs, max_body=frames.MAX_BACK_BODY)

    def put(self, parts: list[bytes]) -> None:
        self.unsent.append(parts)

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self.unsent:
            try:
                self.socket.send_multipart(self.unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self.unsent.popleft()

    def receive(self) -> Message | None:
        """The next message that can be read; None when there is none now."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self.silence.heard()
            try:
                return frames.decode(parts, max_body=frames.MAX_BACK_BODY)
            except PoolError as error:
                log.warning("bad frame from the broker", extra={"why": str(error)})

    def next_wake(self, now: float) -> float:
        """When `turn` or `flush` has something to do."""
        return min(self._hello_due, now + RETRY if self.unsent else NEVER)

    def close(self) -> None:
        self.flush()
        self.handshake.close()
        self.socket.close()
        self.context.term()
