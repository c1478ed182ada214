"""The bounded queue of step results from the compute thread to the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.messages import HandedBack, Outbound, Rows
from mlxpool.worker.compute.progress import Progress

MAX_UNTAKEN_STEPS = 256  # steps whose results may wait for the main thread


class Outbox:
    """Posts results under the current fence. All but `acknowledge` belongs to the compute thread.

    When MAX_UNTAKEN_STEPS results wait, `deliver` blocks in the phase `blocked`.
    """

    def __init__(self, post: Callable[[Outbound], None], progress: Progress) -> None:
        self.fence = 0  # see messages.Rows
        self._post = post
        self._progress = progress
        self._slots = threading.Semaphore(MAX_UNTAKEN_STEPS)

    def deliver(self, rows: list[Delta]) -> None:
        """Post the rows of one step; none, if there are no rows."""
        if not rows:
            return
        if not self._slots.acquire(blocking=False):
            self._progress.enter("blocked")
            self._slots.acquire()
        self._post(Rows(tuple(rows), self.fence))

    def handed_back(self) -> None:
        """Answer `HandBack`, behind all rows."""
        self._post(HandedBack(self.fence))

    def acknowledge(self) -> None:
        """The main thread has taken one `Rows`."""
        self._slots.release()
