"""How fast one worker is, fitted to its heartbeats: replicas need not be of the same speed.

A few observations may be far off, and a worker that seems slow is given nothing that would show
otherwise. So its own speed counts beside that of the model's workers together, the more the more
was observed lately, and less with each heartbeat for which it rests.
"""

from __future__ import annotations

from msgspec import Struct

DEFAULT_PROMPT_MS = 1.0  # of a prompt token, until a worker of the model has read one
DEFAULT_STEP_MS = 30.0  # of a decode step of one row, until a worker of the model has made one
DEFAULT_ROW_MS = 1.0  # more of it with each further row
DECAY = 0.97  # of the weight of a heartbeat with each later one
REST_DECAY = 0.93  # the same, with each heartbeat of a worker that has nothing to do
PRIOR = 0.25  # heartbeats for which the speed of the model's workers counts


class WorkerSpeed(Struct, eq=False):
    """Milliseconds of a prompt token, and of a decode step as a line over its rows.

    The first is a weighted mean, the line a weighted least-squares fit; newer ones weigh more.
    """

    prompt_ms: float = 0.0  # 0: it has read no prompt
    _prompt_weight: float = 0.0
    _weight: float = 0.0
    _rows: float = 0.0  # weighted sums
    _rows_squared: float = 0.0
    _ms: float = 0.0
    _rows_ms: float = 0.0

    def observe_prompt(self, ms: float) -> None:
        """A prompt token takes so long, by what the worker says while it reads a prompt."""
        if ms <= 0:
            return
        self._prompt_weight = self._prompt_weight * DECAY + 1
        self.prompt_ms += (ms - self.prompt_ms) / self._prompt_weight

    def rest(self) -> None:
        """The worker has nothing to do: what was observed of it grows old."""
        self._prompt_weight *= REST_DECAY
        self._weight *= REST_DECAY
        self._rows *= REST_DECAY
        self._rows_squared *= REST_DECAY
        self._ms *= REST_DECAY
        self._rows_ms *= REST_DECAY

    def observe_step(self, rows: int, ms: float) -> None:
        """A decode step of so many rows took so long."""
        if rows <= 0 or ms <= 0:
            return
        self._weight = self._weight * DECAY + 1
        self._rows = self._rows * DECAY + rows
        self._rows_squared = self._rows_squared * DECAY + rows * rows
        self._ms = self._ms * DECAY + ms
        self._rows_ms = self._rows_ms * DECAY + rows * ms

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


def prompt_ms_of(worker: WorkerSpeed, model: WorkerSpeed) -> float:
    """Milliseconds of a prompt token there; `model` is the speed of all its model's workers."""
    if not model.prompt_ms:
        return worker.prompt_ms or DEFAULT_PROMPT_MS
    weight = worker._prompt_weight
    return (weight * worker.prompt_ms + PRIOR * model.prompt_ms) / (weight + PRIOR)


def step_ms_of(worker: WorkerSpeed, model: WorkerSpeed, rows: float) -> float:
    """Milliseconds of a decode step of so many rows there."""
    if not model._weight:
        return worker.step_ms(rows)
    weight = worker._weight
    return (weight * worker.step_ms(rows) + PRIOR * model.step_ms(rows)) / (weight + PRIOR)
