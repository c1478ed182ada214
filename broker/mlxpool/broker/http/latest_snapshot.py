"""The newest snapshot, which the loop hands to the threads of the HTTP server.

A thread that finds it too old wakes the loop, which leaves a new one in its next turn and never
waits for these threads.
"""

from __future__ import annotations

import threading
from time import monotonic

from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.closing import Closing
from mlxpool.common.transport.waker import Waker

FRESH = 0.25  # seconds for which a snapshot is reused: it bounds how many the loop takes
MAX_WAIT = 2.0  # seconds until a loop that does not answer counts as stuck


class Unavailable(Exception):
    """The loop did not answer in MAX_WAIT, or has ended."""


class LatestSnapshot(Closing):
    """`waker` is readable when a thread waits for a new snapshot."""

    def __init__(self) -> None:
        self.fresh, self.max_wait = FRESH, MAX_WAIT
        self.waker = Waker()
        self._changed = threading.Condition()
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._closed = False

    def put(self, snapshot: Snapshot) -> None:
        """Called by the loop after it was woken."""
        self.waker.drain()
        with self._changed:
            self._snapshot, self._at = snapshot, monotonic()
            self._changed.notify_all()

    def get(self) -> Snapshot:
        """A snapshot at most `fresh` seconds old. Raises Unavailable."""
        asked = monotonic()
        with self._changed:
            if self._snapshot is None or asked - self._at > self.fresh:
                self.waker.wake()
                came = self._changed.wait_for(
                    lambda: self._closed or self._at >= asked, self.max_wait
                )
                if self._closed:
                    raise Unavailable("the broker is ending")
                if not came:
                    raise Unavailable(f"the broker's loop has not answered for {self.max_wait:g} s")
            assert self._snapshot is not None
            return self._snapshot

    def close(self) -> None:
        """Threads that wait get Unavailable at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.waker.close()
