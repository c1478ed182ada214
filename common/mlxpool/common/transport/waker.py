"""Wakes a thread that polls: from other threads, and on signals."""

from __future__ import annotations

import signal
import socket

from mlxpool.common.closing import Closing

READ_BYTES = 4096  # the most bytes of one read


class Waker(Closing):
    """A pair of sockets that ends a poll. The polling thread adds the waker to its poll set."""

    def __init__(self) -> None:
        self.socket, self._sender = socket.socketpair()
        self.socket.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor to poll for input."""
        return self.socket.fileno()

    def wake_on_signals(self) -> int:
        """Makes every signal wake the poll with the signal's number as a byte. Main thread only.

        Returns the previous descriptor of `signal.set_wakeup_fd`.
        """
        return signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def wake(self, byte: int = 0) -> None:
        """Makes the poll return. Any thread may call it, also after `close`."""
        try:
            self._sender.send(bytes([byte]))
        except OSError:
            pass  # the buffer is full, so the poll returns anyway; or the waker is closed

    def drain(self) -> bytes:
        """Returns the bytes that woke the poll: arguments of `wake`, and numbers of signals."""
        received = bytearray()
        try:
            while data := self.socket.recv(READ_BYTES):
                received += data
                if len(data) < READ_BYTES:
                    break  # bytes that are still unread end the next poll
        except BlockingIOError:
            pass
        return bytes(received)

    def close(self) -> None:
        """Closes both sockets."""
        self.socket.close()
        self._sender.close()
