"""The ZeroMQ socket of a connection, and the waker of the thread that owns the socket."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence

import zmq

from mlxpool.common.errors import BrokerLost, PoolError, Unauthorized
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials
from mlxpool.common.transport.waker import Waker

SEND_RETRY_INTERVAL = 0.01  # seconds until a full socket is tried again
MAX_READ = 1000  # the most messages read in a row, before other work


class Dealer:
    """A DEALER socket that can be replaced. One thread owns it from `open` to `close`.

    Other threads may only call `wake`. `handshake` belongs to the current socket.
    """

    def __init__(self, endpoint: str, credentials: Credentials | None = None) -> None:
        self.endpoint = endpoint
        self._credentials = credentials
        self._unsent: deque[Sequence[bytes]] = deque()
        self._poller = zmq.Poller()

    def open(self) -> None:
        """Connects. Raises OSError if the endpoint is malformed."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = sockets.dealer(self._context, self.endpoint, self._credentials)
        except OSError:
            self._context.term()
            raise
        self._waker = Waker()
        self._poller.register(self._waker, zmq.POLLIN)
        self._register()

    def _register(self) -> None:
        """Polls the socket and its handshake's monitor."""
        self.handshake = Handshake(self._socket, self.endpoint, self._credentials)
        for source in (self._socket, self.handshake.monitor):
            self._poller.register(source, zmq.POLLIN)

    def _close_socket(self, linger_ms: int) -> None:
        for source in (self._socket, self.handshake.monitor):
            self._poller.unregister(source)
        self.handshake.close()
        self._socket.close(linger=linger_ms)

    def wake(self) -> None:
        """Ends the owning thread's `wait`."""
        self._waker.wake()

    def wait(self, seconds: float | None) -> None:
        """Waits for a message, a handshake or `wake`, for at most `seconds`; None sets no bound."""
        if self._unsent:
            interval = SEND_RETRY_INTERVAL
            seconds = interval if seconds is None else min(seconds, interval)
        self._poller.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
        self._waker.drain()
        self.flush()

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends a message after all unsent messages.

        If the broker has refused the handshake of the connection, first makes a new connection.
        """
        if self.handshake.refusal:
            self.replace()
        self._unsent.append(parts)
        self.flush()

    def flush(self) -> None:
        """Sends messages in order until the socket is full; `wait` sends unsent messages later."""
        while self._unsent:
            try:
                self._socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def received(self) -> Iterator[list[bytes]]:
        """Yields the parts of received messages, at most MAX_READ messages."""
        for _ in range(MAX_READ):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def no_answer(self, silent: float, *, known: bool) -> PoolError:
        """Returns the error for streams and calls after `silent` seconds without a message.

        `known` is True if a broker has answered on this connection before.
        """
        if self.handshake.trouble and not known:  # a known broker accepted the keys
            return Unauthorized(self.handshake.trouble)
        silence = f"no broker answers at {self.endpoint} for {silent:.0f} s"
        if self.handshake.failures:
            silence += ": connections are accepted and closed again before the handshake ends"
        return BrokerLost(silence if known else f"{silence}; start one with `mlxpool serve`")

    def replace(self) -> None:
        """Opens a new connection; the unsent messages of the old connection are dropped."""
        try:
            fresh = sockets.dealer(self._context, self.endpoint, self._credentials)
        except OSError:
            return  # out of descriptors: the old connection may still recover
        self._close_socket(linger_ms=0)
        self._unsent.clear()
        self._socket = fresh
        self._register()

    def close(self) -> None:
        """Closes the socket; up to 200 ms are left for unsent messages."""
        self._close_socket(linger_ms=200)
        self._context.term()
        self._waker.close()
