"""Compiled passes over one row in slabs that checks drafts; see slab_checks for several rows.

A pass is compiled for a number of inputs and of blocks, both rounded up, so that few are enough for
a stream: further inputs repeat the last one, which computes and writes the same again, and blocks
behind those of the row are masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.dot_product import apply_softcap, softmax_average
from mlxpool.worker.attention.in_slabs.slab_batch import SlabBatch
from mlxpool.worker.attention.in_slabs.slab_checks import MASKED_SCORE
from mlxpool.worker.attention.in_slabs.slab_runner import computed, output_of
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.row_cache import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import CompiledPasses
from mlxpool.worker.kernels.score_params import ScoreParams
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


class RowReader:
    """Writes and reads the inputs of one row, at `positions` [L]; see SlabReader.

    The tokens of the row begin with block `first` of a slab, of which `blocks` are read. `layers`:
    what each layer of the slab stores.
    """

    def __init__(
        self, shape: RowShape, positions: mx.array, first: int, blocks: int, layers: list[Arrays]
    ) -> None:
        self._shape, self._layers = shape, layers
        self._begin, self._end = first * KV_BLOCK_TOKENS, (first + blocks) * KV_BLOCK_TOKENS
        self._places = positions + self._begin
        seen = mx.arange(self._end - self._begin) <= positions[:, None]
        self._mask = mx.where(seen, 0.0, MASKED_SCORE)[:, None]  # [L, 1, tokens]

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [L, KV, D] and v [L, KV, V]."""
        stored = self._shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        for array, new in zip(self._layers[layer], stored, strict=True):
            array[:, self._places] = new

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [L, H, D] -> [L, H, V]; each query sees the tokens up to its own."""
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        lines, heads, size = q.shape
        held = tuple(array[:, self._begin : self._end] for array in self._layers[layer])
        keys, values = self._shape.read(held)
        pairs = keys.shape[0]
        asked = (q * scores.scale).reshape(lines, pairs, heads // pairs, size).swapaxes(0, 1)
        found = asked.reshape(pairs, -1, size) @ keys.swapaxes(-1, -2)
        found = apply_softcap(found, scores.softcap).reshape(pairs, lines, heads // pairs, -1)
        found = (found + self._mask).reshape(pairs, -1, keys.shape[1])
        out = softmax_average(found, values).reshape(pairs, lines, heads // pairs, -1)
        return out.swapaxes(0, 1).reshape(lines, heads, -1)


class SlabCheckRunner:
    """Runs compiled passes of a model over one row in slabs, all of whose inputs give logits."""

    def __init__(
        self,
        model: Model,
        shape: RowShape,
        *,
        states: bool = False,
        max_passes: int = MAX_CHECK_PASSES,
    ) -> None:
        """`states`: passes give the states that their logits are of, too."""
        self._model, self._shape, self._states = model, shape, states
        self._pass = CompiledPasses(self._one_pass, max_passes=max_passes)
        self._asked: Counter[Kind] = Counter()  # passes of kinds that are not compiled

    def serves(self, row: SlabRow, lines: int) -> bool:
        """Returns whether a pass over so many inputs of a row is compiled, or is to be now."""
        kind = self._kind(row, lines)
        if kind is None:
            return False
        if kind in self._pass or self._asked[kind] >= COMPILED_AFTER:
            return True
        self._asked[kind] += 1
        return False

    def compiles(self, row: SlabRow, lines: int) -> bool:
        """Returns whether such a pass would be compiled now."""
        kind = self._kind(row, lines)
        return kind is not None and kind not in self._pass and self._asked[kind] >= COMPILED_AFTER

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
        given, layers = self._pass(kind, ids, positions, first, blocks, slab.layers)
        slab.layers = [tuple(arrays) for arrays in layers]
        self._asked.pop(kind, None)
        row.advance(count)
        return output_of([one[:count] for one in given] if lines > count else given)

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
        step = SlabBatch(positions, RowReader(self._shape, positions, first, blocks, layers))
        return computed(self._model, ids, step, states=self._states), layers
