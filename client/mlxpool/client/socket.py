"""A link's socket, and what wakes the thread that owns it."""

from __future__ import annotations

import math
import socket as sockets_of_the_system
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials

RETRY = 0.01  # seconds until a full socket is tried again
AT_ONCE = 1000  # messages read before something else gets its turn


class Port:
    """A DEALER that can be replaced. All but `nudge` belongs to one thread."""

    def __init__(self, endpoint: str, credentials: Credentials | None = None) -> None:
        """Raises OSError for a malformed endpoint."""
        self.endpoint = endpoint
        self._credentials = credentials
        self._unsent: deque[Sequence[bytes]] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = sockets.dealer(self._context, endpoint, credentials)
        except OSError:
            self._context.term()
            raise
        self._wake, self._wake_end = sockets_of_the_system.socketpair()
        self._wake.setblocking(False)
        self._wake_end.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._watch()

    def _watch(self) -> None:
        """Have the poll tell of frames, and of the moment when somebody is there to read ours."""
        self._handshake = Handshake(self._socket, self.endpoint, self._credentials)
        for source in (self._socket, self._handshake.monitor):
            self._poller.register(source, zmq.POLLIN)

    def _close(self, linger: int) -> None:
        for source in (self._socket, self._handshake.monitor):
            self._poller.unregister(source)
        self._handshake.close()
        self._socket.close(linger=linger)

    def nudge(self) -> None:
        """End the other thread's `wait`."""
        try:
            self._wake_end.send(b"\0")
        except OSError:
            pass  # nudged enough, or closed

    def wait(self, seconds: float | None) -> None:
        """Until something comes, somebody nudges, or the time is over; None: for ever."""
        if self._unsent:
            seconds = RETRY if seconds is None else min(seconds, RETRY)
        self._poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
        try:
            while self._wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        self.flush()

    def send(self, parts: Sequence[bytes]) -> None:
        """Send, behind what is not sent yet; who was refused tries once more."""
        if self.refusal:
            self.replace()
        self._unsent.append(parts)
        self.flush()

    def flush(self) -> None:
        """Send in order what the socket takes; the rest is tried again in a moment."""
        while self._unsent:
            try:
                self._socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def received(self) -> Iterator[list[bytes]]:
        """What has come, up to a bound."""
        for _ in range(AT_ONCE):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def connected(self) -> bool:
        """Whether a connection has come about since the last call: perhaps to another broker."""
        return self._handshake.succeeded()

    @property
    def refusal(self) -> str:
        """Why the broker wants nothing to do with us, as of the last `connected`; "": it does."""
        return self._handshake.refusal

    @property
    def hopeless(self) -> bool:
        """Whether who has never spoken to this broker need not try any longer."""
        return self._handshake.hopeless

    @property
    def trouble(self) -> str:
        """Why the newest try to connect failed, where that is known."""
        return self._handshake.trouble

    def replace(self) -> None:
        """A new connection; what the old one has not sent or not given is dropped."""
        try:
            fresh = sockets.dealer(self._context, self.endpoint, self._credentials)
        except OSError:
            return  # out of descriptors: the old one may still come back
        self._close(linger=0)
        self._unsent.clear()
        self._socket = fresh
        self._watch()

    def close(self) -> None:
        """Give what was sent a moment to leave."""
        self._close(linger=200)
        self._context.term()
        self._wake.close()
        self._wake_end.close()
