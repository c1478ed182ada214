"""The recurrent states of the rows of a pass whose spans one kernel scans together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.kernels.recurrent.span_states import (
    MAX_SOURCES,
    NO_SOURCE,
    PlanLine,
    SpanStates,
    StateSlice,
)
from mlxpool.worker.layers.layer_types import SpanScan

Place = tuple[int, int]  # of a state: the number of its source, and its index there


class StateSpan(Struct, frozen=True):
    """`count` new tokens of `row`; `checks`: they are drafts, so each state behind one is kept."""

    row: RowCache
    count: int
    checks: bool

    @property
    def states(self) -> int:
        """How many states the pass writes."""
        return self.count if self.checks else 1


class PassStates:
    """Reads and writes the recurrent states of the spans of a pass, layer by layer."""

    def __init__(self, spans: Sequence[StateSpan]) -> None:
        self._spans = tuple(spans)
        self._firsts = _starts(span.count for span in spans)
        self._written = _starts(span.states for span in spans)
        self._longest = max(span.count for span in spans)
        self._plans: dict[tuple[Place, ...], mx.array] = {}  # most layers have the same

    def recur(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Scans lines [T, ...] of all spans from their states; returns the outputs [T, ...]."""
        sources, places = sources_of([span.row.state_slice(layer) for span in self._spans])
        states = SpanStates(sources, self._plan(tuple(places)), self._longest, self._written[-1])
        out, after = scan(lines, states)
        for span, begin in zip(self._spans, self._written, strict=False):
            if span.checks:
                slices = [StateSlice(after, begin + number) for number in range(span.count)]
                span.row.put_states(layer, *slices)
            elif span.count > 1 and self._written[-1] > 1:
                # A prompt that is read in parts may wait while others decode: a copy lets their
                # states be freed.
                span.row.put_states(layer, StateSlice(after, begin).alone())
            else:
                span.row.put_states(layer, StateSlice(after, begin))
        return out

    def _plan(self, places: tuple[Place, ...]) -> mx.array:
        """Returns the plan of a layer whose states have these places."""
        if places not in self._plans:
            numbers: list[PlanLine] = [
                (first, span.count, *place, written, int(span.checks))
                for first, span, place, written in zip(
                    self._firsts, self._spans, places, self._written, strict=False
                )
            ]
            self._plans[places] = mx.array(np.array(numbers, dtype=np.int32))
        return self._plans[places]


def settle(rows: Iterable[RowCache]) -> None:
    """Forgets the states to which rows went back, if passes were taken back; none is in flight.

    Those behind drafts that were checked are in arrays that are several times as large as others.
    """
    for row in rows:
        for layer in row.state_layers():
            layer.settle()


def keep_alone(row: RowCache) -> list[mx.array]:
    """Leaves a row nothing but its newest states, in arrays of its own: no pass will compute it.

    Returns the arrays that have to be evaluated.
    """
    settle([row])
    return [array for layer in row.state_layers() for array in layer.own()]


def separate(idle: Iterable[RowCache], going: Iterable[RowCache]) -> list[mx.array]:
    """Gives rows that sit out a pass states of their own, if they share arrays with rows in it.

    Those arrays are freed when all rows have gone on; a row that sits out would keep them whole.
    Returns the arrays that have to be evaluated.
    """
    shared = {id(one) for row in going for layer in row.state_layers() for one in layer.arrays}
    found: list[mx.array] = []
    for row in idle:
        layers = row.state_layers()
        if any(id(one) in shared for layer in layers[:1] for one in layer.arrays):
            found += [array for layer in layers for array in layer.own()]
    return found


def sources_of(
    held: Sequence[StateSlice | None],
) -> tuple[tuple[mx.array, ...], list[Place]]:
    """Returns at most MAX_SOURCES arrays that have these states, and the place of each state.

    Rows that were in the same pass have their states in one array. States of arrays beyond the
    first ones are copied into one more.
    """
    sources: list[mx.array] = []
    numbers: dict[int, int] = {}  # of the sources, by their id
    places: list[Place] = []
    for one in held:
        if one is None:
            places.append((NO_SOURCE, 0))
            continue
        whole = one.whole
        number = numbers.setdefault(id(whole), len(sources))
        if number == len(sources):
            sources.append(whole)
        places.append((number, one.index))
    if len(sources) <= MAX_SOURCES:
        return tuple(sources), places
    last = MAX_SOURCES - 1  # the source that has the copies
    copies: list[mx.array] = []
    for at, (number, index) in enumerate(places):
        if number >= last:
            places[at] = last, len(copies)
            copies.append(sources[number][index : index + 1])
    return (*sources[:last], mx.concatenate(copies)), places


def _starts(counts: Iterable[int]) -> list[int]:
    """Returns where each of several runs begins, and behind them where the last one ends."""
    return [0, *accumulate(counts)]
