"""The milliseconds of a step by part, while the steps and generations of a worker run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from mlxpool.worker.compute import steps
from mlxpool.worker.compute.constrained_rows import ConstrainedRows
from mlxpool.worker.compute.generations import Generation
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.token_draws import TokenDraws

# Each part's time is without that of the parts which it calls.
PARTS: Mapping[str, tuple[Any, str]] = {
    "schedule": (steps, "schedule"),
    "build the pass": (ModelEngine, "_start"),
    "hand it to MLX": (mx, "async_eval"),
    "build the draw": (ModelEngine, "draw"),
    "options and masks of the draw": (TokenDraws, "draw"),
    "wait for the device": (Flight, "wait"),
    "read the tokens": (ModelEngine, "collect"),
    "deltas": (Generation, "commit"),
    "take tokens ahead": (ConstrainedRows, "take_ahead"),
    "take tokens": (ConstrainedRows, "take"),
    "begin masks behind runs": (ConstrainedRows, "begin_behind_runs"),
    "masks": (ConstrainedRows, "masks"),
    "rest": (Steps, "run"),
}


class StepParts:
    """Seconds of each part of each step; `name` tells what kind a step is."""

    def __init__(self) -> None:
        self.found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                took = time.perf_counter() - began
                self._now[part] += took - self._inner.pop()
                self._inner[-1] += took

        return run

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Times the parts of each step while the context is entered."""
        patches = [
            mock.patch.object(owner, name, self._timed(part, getattr(owner, name)))
            for part, (owner, name) in PARTS.items()
        ]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    def end_step(self, kind: str) -> None:
        """The parts since the last call were a step of this kind."""
        self.found[kind].append(dict(self._now))
        self._now.clear()

    def lines(self) -> Iterator[str]:
        """Yields for each kind: how many steps, milliseconds of one (mean), and of its parts."""
        for kind, every in self.found.items():
            sums: defaultdict[str, float] = defaultdict(float)
            for one in every:
                for part, seconds in one.items():
                    sums[part] += 1e3 * seconds / len(every)
            parts = ", ".join(f"{part} {sums[part]:.3f}" for part in PARTS if part in sums)
            yield f"{kind}: {len(every)} steps of {sum(sums.values()):.3f} ms: {parts}"
