"""The recurrent states of a pass: the locations of each span's old and new states."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TypeAlias

import mlx.core as mx
from msgspec import Struct

MAX_SOURCES = 4  # the most arrays from which a kernel reads states
NO_SOURCE = -1  # the source of a span that begins with a state of zeros
# A row of the plan, for one span: its first token in the pass, its number of tokens, the source of
# its state (or NO_SOURCE) and the index of the state in the source, the index of its first written
# state, and whether the state after each token (1) or only the last state (0) is written.
PlanLine: TypeAlias = tuple[int, int, int, int, int, int]


# not frozen, to save time: a pass makes an object for each row and layer
class StateSlice(Struct, eq=False):
    """The state of one sequence in one layer: row `index` of `whole` [R, size] in float32.

    A row has the numbers of all arrays of the state, one array after the other. A pass writes
    `whole` with a row for each decoding sequence, or with one row for a chunk of a prompt. `whole`
    is freed when no sequence refers to it.
    """

    whole: mx.array
    index: int

    def alone(self) -> StateSlice:
        """Returns the state in a separate array, so that `whole` can be freed."""
        if self.whole.shape[0] == 1:
            return self
        return StateSlice(mx.contiguous(self.whole[self.index : self.index + 1]), 0)

    def arrays(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[mx.array, ...]:
        """Returns views of the arrays of the state, with these shapes."""
        line = self.whole[self.index : self.index + 1]  # a slice, as an index would copy
        ends = [*accumulate(map(math.prod, shapes))]
        starts = [0, *ends[:-1]]
        return tuple(
            line[:, start:end].reshape(shape)
            for shape, start, end in zip(shapes, starts, ends, strict=True)
        )


class SpanStates(Struct, frozen=True):
    """The states of one layer that a pass reads and writes.

    `sources`: at most MAX_SOURCES arrays [R, size]. `plan` [spans, 6] in int32: a PlanLine for each
    span. `longest`: the tokens of the longest span. `written`: the number of written states.
    """

    sources: tuple[mx.array, ...]
    plan: mx.array
    longest: int
    written: int
