"""Predicts the time of a pass from its load, by a fit to measured passes. Pure.

seconds = a + b * lines + c * keys + d * pairs + e * drawn, with the counts of a Load. The
coefficients a to e are fitted to the newest passes and are never negative. Passes that compiled
something are not observed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.scheduling.spans import Span

OBSERVATIONS = 128  # newest passes that a fit uses: this many with prompts, this many without
FIT_INTERVAL = 16  # the fewest observations between two fits of 0.5 ms each
FIT_ROUNDS = 4  # rounds of a fit; each round weights errors by the previous predictions
MIN_OBSERVATIONS = 2
SLOW_STEP_TARGET = 0.2  # target seconds of a pass on a CPU or of a pass that computes span by span
# The units in which the fit counts passes, inputs, keys, pairs and drawn tokens.
_UNITS = np.array([1.0, 1e3, 1e5, 1e6, 1e2])
_RIDGE = 1e-6

Floats = npt.NDArray[np.float64]


class Load(Struct, frozen=True):
    """The load of a pass: inputs, keys read by decode steps, query-key pairs, and drawn tokens."""

    lines: int = 0
    keys: int = 0  # keys read by decode steps
    pairs: int = 0  # query-key pairs in chunks
    drawn: int = 0

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Self:
        """Returns the load of a pass over these spans."""
        lines = keys = pairs = drawn = 0
        for span in spans:  # this loop runs in every step, so it makes few calls
            count = span.count
            end = span.start + count
            lines += count
            drawn += span.draws
            if count == 1 and span.draws:
                keys += end
            else:
                pairs += count * end
        return cls(lines, keys, pairs, drawn)

    def with_span(self, span: Span) -> Self:
        """Returns the load with one more span."""
        single = span.count == 1 and span.draws
        keys, pairs = (span.end, 0) if single else (0, span.count * span.end)
        return type(self)(
            self.lines + span.count, self.keys + keys, self.pairs + pairs, self.drawn + span.draws
        )


class StepTarget(Struct, frozen=True):
    """The seconds by which prompts may lengthen a pass in which sequences decode.

    This target is the time of `steps` decode steps of one sequence, between `least` and `most`.
    """

    least: float
    most: float
    steps: int = 6

    @classmethod
    def of_device(cls, *, on_gpu: bool) -> Self:
        """Returns the target of a GPU or a CPU."""
        return cls(0.008, 0.040) if on_gpu else cls(SLOW_STEP_TARGET, SLOW_STEP_TARGET)

    def seconds(self, decode_step: float) -> float:
        """Returns the target of a model whose decode step takes `decode_step` seconds."""
        return min(self.most, max(self.least, self.steps * decode_step))


class StepCost:
    """The fitted coefficients; the prediction is 0 before the first fit."""

    def __init__(self) -> None:
        self._rows: deque[tuple[list[float], float]] = deque(maxlen=OBSERVATIONS)
        self._mixed: deque[tuple[list[float], float]] = deque(maxlen=OBSERVATIONS)
        self._weights = [0.0] * 5
        self._new = 0  # observations since the last fit

    def seconds(self, load: Load) -> float:
        """Predicts the seconds of a pass.

        Fits the coefficients first, if enough passes were observed since the last fit. So no fits
        take place while nothing is predicted, as in a series of pure decode steps.
        """
        observations = len(self._rows) + len(self._mixed)
        enough = FIT_INTERVAL if observations >= FIT_INTERVAL else 1
        if observations >= MIN_OBSERVATIONS and self._new >= enough:
            self._fit()
        a, b, c, d, e = self._weights
        return a + b * load.lines + c * load.keys + d * load.pairs + e * load.drawn

    def observe(self, load: Load, seconds: float) -> None:
        """Adds a measured pass for the next fits."""
        features = [1.0, load.lines, load.keys, load.pairs, load.drawn]
        (self._mixed if load.pairs else self._rows).append((features, seconds))
        self._new += 1

    @property
    def observed(self) -> list[tuple[Load, float]]:
        """The passes that fits use, as passed to `observe`."""
        return [
            (Load(*(round(feature) for feature in features[1:])), seconds)
            for features, seconds in (*self._rows, *self._mixed)
        ]

    def _fit(self) -> None:
        """Fits the coefficients by least squares of relative errors.

        An error is divided by the longer of the measured and the predicted time, so it is at most
        1. So two types of passes have little weight: a pass that waited for another process, and a
        pass whose end was read late, after which the next pass seems to take no time.
        """
        self._new = 0
        passes = [*self._rows, *self._mixed]
        seconds = np.array([took for _, took in passes])
        features = np.array([row for row, _ in passes]) / _UNITS
        weights = _least_squares(features, seconds)
        for _ in range(FIT_ROUNDS):
            scale = np.maximum(np.maximum(seconds, features @ weights), 1e-9)
            weights = _least_squares(features / scale[:, None], seconds / scale)
        self._weights = (weights / _UNITS).tolist()


def _least_squares(features: Floats, seconds: Floats) -> Floats:
    """Returns the coefficients of the least-squares fit without negative coefficients.

    While a coefficient is negative, the most negative becomes 0 and the others are fitted again.
    """
    weights = np.zeros(features.shape[1])
    kept = list(range(features.shape[1]))
    while kept:
        part = features[:, kept]
        square = part.T @ part
        square += _RIDGE * np.trace(square) * np.eye(len(kept))
        solution = np.linalg.solve(square, part.T @ seconds)
        if (solution >= 0).all():
            weights[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return weights
