"""The speed of a worker, fitted to its heartbeats. Replicas may differ in speed.

A few observations may be wrong, and a worker that seems slow gets no requests that would correct
its speed. So a worker's own speed is mixed with the speed of all workers of the model. The weight
of its own speed grows with observations, and falls with idle heartbeats.
"""

from __future__ import annotations

from msgspec import Struct

DEFAULT_PROMPT_MS = 1.0  # ms per prompt token, until a worker of the model has read a prompt
DEFAULT_STEP_MS = 30.0  # ms of a decode step of one row, before the first measured step
DEFAULT_ROW_MS = 1.0  # ms that each further row adds to a decode step
DECAY = 0.97  # factor by which each measurement lowers the weight of earlier ones
REST_DECAY = 0.93  # the same factor for each heartbeat of an idle worker
PRIOR = 0.25  # weight of the model's mean speed, as a number of measurements


class WorkerSpeed(Struct, eq=False):
    """The measured speed of a worker: the time of a prompt token, and of a decode step.

    The time of a prompt token is a weighted mean. The time of a decode step is a linear function of
    the batch size, a weighted least-squares fit. Newer observations weigh more. Times are
    milliseconds.
    """

    prompt_ms: float = 0.0  # 0 until the worker has read a prompt
    _prompt_weight: float = 0.0
    _weight: float = 0.0
    _rows: float = 0.0  # weighted sums, like the next three fields
    _rows_squared: float = 0.0
    _ms: float = 0.0
    _rows_ms: float = 0.0

    def observe_prompt(self, ms: float) -> None:
        """Adds a measurement: the worker reads a prompt in `ms` milliseconds per token."""
        if ms <= 0:
            return
        self._prompt_weight = self._prompt_weight * DECAY + 1
        self.prompt_ms += (ms - self.prompt_ms) / self._prompt_weight

    def rest(self) -> None:
        """Lowers the weight of the observations. Called at each heartbeat of an idle worker."""
        self._prompt_weight *= REST_DECAY
        self._weight *= REST_DECAY
        self._rows *= REST_DECAY
        self._rows_squared *= REST_DECAY
        self._ms *= REST_DECAY
        self._rows_ms *= REST_DECAY

    def observe_step(self, rows: int, ms: float) -> None:
        """Adds the time of a decode step of `rows` sequences."""
        if rows <= 0 or ms <= 0:
            return
        self._weight = self._weight * DECAY + 1
        self._rows = self._rows * DECAY + rows
        self._rows_squared = self._rows_squared * DECAY + rows * rows
        self._ms = self._ms * DECAY + ms
        self._rows_ms = self._rows_ms * DECAY + rows * ms

    def step_ms(self, rows: float) -> float:
        """Returns the milliseconds of a decode step of `rows` sequences.

        Returns a default before the first measurement.
        """
        if not self._weight:
            return DEFAULT_STEP_MS + DEFAULT_ROW_MS * (rows - 1)
        mean_rows, mean_ms = self._rows / self._weight, self._ms / self._weight
        spread = self._rows_squared / self._weight - mean_rows**2
        together = self._rows_ms / self._weight - mean_rows * mean_ms
        slope = max(0.0, together / spread) if spread > 0.25 else 0.0
        # For few rows the extrapolated fit may be near 0 or negative, but every step takes time.
        return max(mean_ms + slope * (rows - mean_rows), 0.1 * mean_ms)


def prompt_ms_of(worker: WorkerSpeed, model: WorkerSpeed) -> float:
    """Returns the milliseconds that a worker needs for a prompt token.

    `model` is the speed of all workers of the model.
    """
    if not model.prompt_ms:
        return worker.prompt_ms or DEFAULT_PROMPT_MS
    weight = worker._prompt_weight
    return (weight * worker.prompt_ms + PRIOR * model.prompt_ms) / (weight + PRIOR)


def step_ms_of(worker: WorkerSpeed, model: WorkerSpeed, rows: float) -> float:
    """Returns the milliseconds that a worker needs for a decode step of `rows` sequences.

    `model` is the speed of all workers of the model.
    """
    if not model._weight:
        return worker.step_ms(rows)
    weight = worker._weight
    return (weight * worker.step_ms(rows) + PRIOR * model.step_ms(rows)) / (weight + PRIOR)
