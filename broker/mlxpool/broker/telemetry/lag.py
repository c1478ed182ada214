"""How long the broker's loop has kept everybody waiting, over the last while."""

from __future__ import annotations

WINDOW = 15.0  # seconds


class Lag:
    """The longest turn of this window and of the one before."""

    __slots__ = ("_before", "_now", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._now = self._before = 0.0

    def note(self, seconds: float, now: float) -> None:
        """One turn took so long."""
        if now - self._since >= WINDOW:
            self._roll(now)
        if seconds > self._now:
            self._now = seconds

    def worst(self, now: float) -> float:
        """Seconds: of the last WINDOW at least, of twice as long at most."""
        if now - self._since >= WINDOW:
            self._roll(now)
        return max(self._now, self._before)

    def _roll(self, now: float) -> None:
        self._before = self._now if now - self._since < 2 * WINDOW else 0.0
        self._since, self._now = now, 0.0
