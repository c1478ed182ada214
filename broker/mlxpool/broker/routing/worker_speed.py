"""How fast one worker is, fitted to its heartbeats: replicas need not be of the same speed."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PROMPT_MS = 1.0  # of a prompt token, until a worker of the model has read one
DEFAULT_STEP_MS = 30.0  # of a decode step of one row, until a worker of the model has made one
DEFAULT_ROW_MS = 1.0  # more of it with each further row
DECAY = 0.97  # of the weight of a heartbeat with each later one


@dataclass(eq=False, slots=True)
class WorkerSpeed:
    """Milliseconds of a prompt token, and of a decode step as a line over its rows.

    The line is a weighted least-squares fit of the steps in heartbeats; newer ones weigh more.
    """

    prompt_ms: float = 0.0  # 0: it has read no prompt
    _weight: float = 0.0
    _rows: float = 0.0  # weighted sums
    _rows_squared: float = 0.0
    _ms: float = 0.0
    _rows_ms: float = 0.0

    def observe_step(self, rows: int, ms: float) -> None:
        """A decode step of so many rows took so long."""
        if rows <= 0 or ms <= 0:
            return
        self._weight = self._weight * DECAY + 1
        self._rows = self._rows * DECAY + rows
        self._rows_squared = self._rows_squared * DECAY + rows * rows
        self._ms = self._ms * DECAY + ms
        self._rows_ms = self._rows_ms * DECAY + rows * ms

    @property
    def knows_steps(self) -> bool:
        return self._weight > 0

    def step_ms(self, rows: float) -> float:
        """Returns how long a decode step of so many rows takes: a default before the first one."""
        if not self._weight:
            return DEFAULT_STEP_MS + DEFAULT_ROW_MS * (rows - 1)
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        spread = self._rows_squared / self._weight - mean_rows**2
        together = self._rows_ms / self._weight - mean_rows * mean_ms
        slope = max(0.0, together / spread) if spread > 0.25 else 0.0
        # A step of one row is no free one, whatever the line says left of what was seen.
        return max(mean_ms + slope * (rows - mean_rows), 0.1 * mean_ms)
