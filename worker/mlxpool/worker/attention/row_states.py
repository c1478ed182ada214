"""The recurrent states of a pass's rows, if one kernel scans all spans together."""

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

Place = tuple[int, int]  # the number of a state's source array, and the state's index in this array


class StateSpan(Struct, frozen=True):
    """`count` new tokens of `row`, a span of a pass.

    `checks`: the tokens check drafts, so the state after each token is stored.
    """

    row: RowCache
    count: int
    checks: bool

    @property
    def states(self) -> int:
        """The number of states that the pass writes."""
        return self.count if self.checks else 1


class PassStates:
    """Reads and writes the recurrent states of the spans of a pass, layer by layer."""

    def __init__(self, spans: Sequence[StateSpan]) -> None:
        self.spans = tuple(spans)  # in the order of the pass's lines
        self._firsts = _starts(span.count for span in spans)
        self._written = _starts(span.states for span in spans)
        self._longest = max(span.count for span in spans)
        self._plans: dict[tuple[Place, ...], mx.array] = {}  # most layers have the same plan

    def recur(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Scans lines [T, ...] of all spans from their states; returns the outputs [T, ...]."""
        sources, places = sources_of([span.row.state_slice(layer) for span in self.spans])
        states = SpanStates(sources, self._plan(tuple(places)), self._longest, self._written[-1])
        out, after = scan(lines, states)
        for span, begin in zip(self.spans, self._written, strict=False):
            if span.checks:
                slices = [StateSlice(after, begin + number) for number in range(span.count)]
                span.row.put_states(layer, *slices)
            elif span.count > 1 and self._written[-1] > 1:
                # A row that reads its prompt in parts may wait while other rows decode. With a copy
                # of the waiting row's state, the array with the other rows' states can be freed.
                span.row.put_states(layer, StateSlice(after, begin).alone())
            else:
                span.row.put_states(layer, StateSlice(after, begin))
        return out

    def _plan(self, places: tuple[Place, ...]) -> mx.array:
        """Returns the kernel's plan for a layer.

        `places`: for each span, the index of the source array with its state, and the state's index
        in that array.
        """
        if places not in self._plans:
            numbers: list[PlanLine] = [
                (first, span.count, *place, written, int(span.checks))
                for first, span, place, written in zip(
                    self._firsts, self.spans, places, self._written, strict=False
                )
            ]
            self._plans[places] = mx.array(np.array(numbers, dtype=np.int32))
        return self._plans[places]


def settle(rows: Iterable[RowCache]) -> None:
    """Drops all states of rows but the newest, to free memory. No pass may be in flight.

    Arrays with the states after checked drafts are several times as large as other arrays.
    """
    for row in rows:
        for layer in row.state_layers():
            layer.settle()


def keep_alone(row: RowCache) -> list[mx.array]:
    """Drops all states of a row but the newest, and copies the newest out of shared arrays.

    Called for a row that the prefix cache may keep after the end of its sequence. Returns the
    arrays to evaluate.
    """
    settle([row])
    return [array for layer in row.state_layers() for array in layer.own()]


def separate(idle: Iterable[RowCache], going: Iterable[RowCache]) -> list[mx.array]:
    """Copies the states of `idle` rows if they share arrays with the rows `going` into a pass.

    A shared array is freed when no row uses it any more; an idle row would keep the whole array.
    Returns the arrays to evaluate.
    """
    shared = {id(array) for row in going for layer in row.state_layers() for array in layer.arrays}
    owned: list[mx.array] = []
    for row in idle:
        layers = row.state_layers()
        if any(id(array) in shared for layer in layers[:1] for array in layer.arrays):
            owned += [array for layer in layers for array in layer.own()]
    return owned


def sources_of(
    held: Sequence[StateSlice | None],
) -> tuple[tuple[mx.array, ...], list[Place]]:
    """Returns at most MAX_SOURCES arrays with these states, and the place of each state.

    A place is the index of an array and the state's index in this array. Rows that were in the same
    pass have their states in one array. If the states are in more arrays, the states of the last
    arrays are copied into one array.
    """
    sources: list[mx.array] = []
    numbers: dict[int, int] = {}  # numbers of the sources, by their id
    places: list[Place] = []
    for state in held:
        if state is None:
            places.append((NO_SOURCE, 0))
            continue
        whole = state.whole
        number = numbers.setdefault(id(whole), len(sources))
        if number == len(sources):
            sources.append(whole)
        places.append((number, state.index))
    if len(sources) <= MAX_SOURCES:
        return tuple(sources), places
    last = MAX_SOURCES - 1  # the number of the source with the copies
    copies: list[mx.array] = []
    for at, (number, index) in enumerate(places):
        if number >= last:
            places[at] = last, len(copies)
            copies.append(sources[number][index : index + 1])
    return (*sources[:last], mx.concatenate(copies)), places


def _starts(counts: Iterable[int]) -> list[int]:
    """Returns the starts of consecutive runs with these lengths, and the end of the last run."""
    return [0, *accumulate(counts)]
