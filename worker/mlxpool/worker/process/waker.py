"""How other threads and signals wake the edge out of its poll."""

from __future__ import annotations

import signal
import socket


class Wake:
    """A pair of sockets; `end` goes into the edge's poll set."""

    def __init__(self) -> None:
        self.end, self._far_end = socket.socketpair()
        self.end.setblocking(False)
        self._far_end.setblocking(False)

    def on_signals(self) -> None:
        """Have every signal wake the edge, too. Main thread only."""
        signal.set_wakeup_fd(self._far_end.fileno(), warn_on_full_buffer=False)

    def nudge(self) -> None:
        """From any thread."""
        try:
            self._far_end.send(b"\0")
        except BlockingIOError:
            pass  # it has been nudged enough

    def empty(self) -> None:
        try:
            while self.end.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Nobody polls it any more."""
        self.end.close()
        self._far_end.close()
