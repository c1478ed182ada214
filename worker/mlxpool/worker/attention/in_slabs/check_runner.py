"""Compiled passes over one row in slabs that checks drafts; see check_reader.py for several rows.

A pass is compiled for a number of inputs and of blocks, both rounded up, so that few are enough for
a stream: further inputs repeat the last one, which computes and writes the same again, and blocks
behind those of the row are masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.in_slabs.compiled_batch import CompiledRunner
from mlxpool.worker.attention.in_slabs.row_reader import RowReader
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import CompiledPasses
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

# Inputs of a pass that is compiled. They are a power of two: kernels of OpenBLAS compute four lines
# at a time, and four take it no longer than one or three.
MAX_LINES = 16
MAX_CHECK_PASSES = 8  # that are kept; a stream needs one for each number of inputs
COMPILED_AFTER = 4  # passes of a kind: to compile one takes as long as that many gain by it

Kind = tuple[int, int, int]  # inputs, first block in the slab, blocks


def check_sizes(drafts: int) -> Iterator[int]:
    """Yields the numbers of inputs for which passes with up to `drafts` drafts are compiled."""
    lines = 2
    while lines <= MAX_LINES:
        yield lines
        if lines > drafts:
            return
        lines *= 2


class SlabCheckRunner(CompiledRunner):
    """Runs compiled passes of a model over one row in slabs that checks drafts."""

    def __init__(
        self,
        model: Model,
        shape: RowShape,
        *,
        states: bool = False,
        max_passes: int = MAX_CHECK_PASSES,
    ) -> None:
        """`states`: see CompiledRunner."""
        super().__init__(model, shape, states=states)
        self.passes = CompiledPasses(self._one_pass, max_passes=max_passes)
        self._asked: Counter[Kind] = Counter()  # passes of kinds that are not compiled

    def serves(self, row: SlabRow, lines: int) -> bool:
        """Returns whether a pass over so many inputs of a row is compiled, or is to be now."""
        kind = self._kind(row, lines)
        if kind is None:
            return False
        if kind in self.passes or self._asked[kind] >= COMPILED_AFTER:
            return True
        self._asked[kind] += 1
        return False

    def compiles(self, row: SlabRow, lines: int) -> bool:
        """Returns whether such a pass would be compiled now."""
        kind = self._kind(row, lines)
        return kind is not None and kind not in self.passes and self._asked[kind] >= COMPILED_AFTER

    def __call__(self, row: SlabRow, ids: mx.array) -> PassOutput:
        """Computes a pass over inputs `ids` [L] of a row that it `serves`; advances the row."""
        count = ids.shape[0]
        kind = self._kind(row, count)
        assert kind is not None, "the blocks of a row that is served are neighbours"
        lines, first, blocks = kind
        numbers = np.minimum(np.arange(lines, dtype=np.int32), count - 1)
        if lines > count:
            ids = ids[mx.array(numbers)]
        positions = mx.array(numbers + np.int32(row.offset))
        slab, _ = row.table[0]
        given, layers = self.passes(kind, ids, positions, first, blocks, slab.layers)
        self._keep([slab], [layers])
        self._asked.pop(kind, None)
        row.advance(count)
        return self._output([one[:count] for one in given] if lines > count else given)

    def _kind(self, row: SlabRow, lines: int) -> Kind | None:
        """Returns what a pass is compiled for; None: it cannot be."""
        if lines > MAX_LINES:
            return None
        row.reserve(row.offset + lines)
        slab, first = row.table[0]
        used = blocks_for(row.offset + lines)
        if row.table[:used] != [(slab, first + number) for number in range(used)]:
            return None
        whole = slab.layers[0][0].shape[1] // KV_BLOCK_TOKENS
        blocks = min(1 << (used - 1).bit_length(), whole - first)
        return 1 << (lines - 1).bit_length(), first, blocks

    def _one_pass(
        self,
        ids: mx.array,
        positions: mx.array,
        first: int,
        blocks: int,
        layers: list[Arrays],
    ) -> tuple[Sequence[mx.array], list[Arrays]]:
        reader = RowReader(self._shape, positions, first, blocks, layers)
        return self._computed(ids, positions, reader), layers
