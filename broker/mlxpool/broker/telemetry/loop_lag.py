"""The longest time for which the broker's loop was busy or late, over a moving window."""

from __future__ import annotations

WINDOW = 15.0  # seconds


class LoopLag:
    """The longest turn of this window and of the window before."""

    __slots__ = ("_current", "_previous", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._current = self._previous = 0.0

    def record(self, seconds: float, now: float) -> None:
        """One turn took `seconds`."""
        if now - self._since >= WINDOW:
            self._roll(now)
        if seconds > self._current:
            self._current = seconds

    def worst(self, now: float) -> float:
        """Seconds: the longest of the last WINDOW at least, of twice as long at most."""
        if now - self._since >= WINDOW:
            self._roll(now)
        return max(self._current, self._previous)

    def _roll(self, now: float) -> None:
        self._previous = self._current if now - self._since < 2 * WINDOW else 0.0
        self._since, self._current = now, 0.0
