"""Attention of one row in slabs that checks drafts, whose blocks are neighbours."""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.attention.dot_product import apply_softcap, softmax_average
from mlxpool.worker.attention.in_slabs.block_attention import (
    MASKED_SCORE,
    require_no_sinks,
    stored_of,
)
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS


class RowReader:
    """Writes and reads the inputs of one row, at `positions` [L]; see compiled_batch.Reader.

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
        stored = stored_of(self._shape, k, v)
        for array, new in zip(self._layers[layer], stored, strict=True):
            array[:, self._places] = new

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [L, H, D] -> [L, H, V]; each query sees the tokens up to its own."""
        require_no_sinks(scores)
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
