"""What the compute thread is doing, as the edge reports it in beats.

Written by the compute thread alone, read by the edge: single attributes, so no lock is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """`count` moves at each load shard, prefill chunk and decode step."""

    def __init__(self, on_phase: Callable[[], None], clock: Callable[[], float]) -> None:
        self.phase = "boot"
        self.since = clock()  # when the phase began
        self.count = 0
        self.step_ms = 0.0  # the newest decode step
        self.in_prefill: bytes | None = None  # the request whose prompt is being read
        self.running = 0
        self.waiting = 0
        self.memory: dict[str, int] = {}
        self.prefix: dict[str, int] = {}
        self._on_phase = on_phase
        self._clock = clock

    def enter(self, phase: str) -> None:
        """Change the phase; the edge sends a beat at once."""
        if phase != self.phase:
            self.phase, self.since = phase, self._clock()
            self._on_phase()

    def moved(self) -> None:
        self.count += 1


def monotonic() -> float:
    """The one clock of a worker."""
    return time.monotonic()
