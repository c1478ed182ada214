"""Replaces the broker's loop: publishes snapshots for the HTTP server until a test stops it."""

from __future__ import annotations

import threading
from select import select

from mlxpool.broker.http.server import HttpServer
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.closing import Closing


class Loop(Closing):
    """Publishes a snapshot at each wake-up while `turning` is true."""

    def __init__(self, server: HttpServer, snapshot: Snapshot) -> None:
        self.server, self.snapshot = server, snapshot
        self.left = 0
        self.over = False
        self._turning = True
        self._turn = threading.Lock()  # held while a snapshot is published
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    @property
    def turning(self) -> bool:
        return self._turning

    @turning.setter
    def turning(self, on: bool) -> None:
        """Starts or stops the loop: with False no more snapshots are published."""
        with self._turn:
            self._turning = on

    def _run(self) -> None:
        waker = self.server.latest.waker
        while not self.over:
            if not select([waker], [], [], 0.01)[0]:
                continue
            with self._turn:
                if self._turning:
                    self.left += 1
                    self.server.latest.put(self.snapshot)

    def close(self) -> None:
        self.over = True
        self.thread.join()
