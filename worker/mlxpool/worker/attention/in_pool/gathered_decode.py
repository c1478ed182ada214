"""Compiled decode passes over rows of the block pool by MLX's operations.

These passes are for models whose attention our kernels do not compute. A pass copies the blocks
that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.dot_product import unfused_attention
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedRow
from mlxpool.worker.attention.rotary import DecodingRows
from mlxpool.worker.attention.row_shape import Arrays
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import CompiledPasses
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import blocks_for

MAX_PASSES = 128  # the most compiled passes in memory; a GPU's host has memory for this many
TABLE_STEP = 8  # blocks; table widths are multiples of this, so that few passes are compiled
NO_STATES = "a pool of blocks has no states, see RowShape.fits_blocks"


class GatheredBatch(DecodingRows):
    """A ForwardBatch of one token for each row; its arrays belong to one compiled pass."""

    no_states = NO_STATES

    def __init__(self, pool: KVPool, positions: mx.array, slots: mx.array, table: mx.array) -> None:
        """`positions` and `slots` [R] of the new tokens; `table` [R, B]: the rows' block tables."""
        super().__init__(positions)
        self._pool, self._positions = pool, positions
        self._slots, self._table = slots, table

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Writes k and v into the pool and attends; see ForwardBatch.attend for the shapes."""
        keys, values = self._pool.shape.read(self._stored(layer, (k, v)))
        return self._seen(layer, q, keys, values, scores)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Writes the latents into the pool and attends; see ForwardBatch.attend_latent."""
        (latents,) = self._stored(layer, (latent[:, None],))
        values = latents[..., : heads.rank]
        read = self._seen(layer, heads.absorb(q), latents, values, ScoreParams(scale))
        return heads.to_values(read)

    def _stored(self, layer: int, fresh: Arrays) -> Arrays:
        """Writes new arrays [R, heads, size]; returns all stored arrays [R, heads, L, size]."""
        return self._pool.gather(layer, self._pool.write(layer, fresh, self._slots, self._table))

    def _seen(
        self, layer: int, q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Attends: q [R, H, D], keys [R, KV, L, D], values [R, KV, L, V] -> [R, H, V]."""
        window = self._pool.shape.window(layer)
        tokens, last = mx.arange(keys.shape[2])[None], self._positions[:, None]
        inside = tokens <= last
        if window:
            inside = inside & (tokens > last - window)
        mask = inside[:, None, None, None]
        return unfused_attention(q[:, :, None], keys, values, scores, mask)[:, :, 0]


class GatheredDecode:
    """Runs decode passes over rows of a pool; a pass is compiled once for each padded width.

    The width is the number of rows, see `padded_width`. Padding repeats the last row; each copy of
    the row computes and writes the same numbers.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        notice: Callable[[], None] = lambda: None,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        """`notice` is called before a pass is compiled.

        `keeps_states`: passes return the states of all inputs. `keeps_drawn`: passes return the
        states of their logits.
        """
        self._model, self._pool = model, pool
        self._keeps_states, self._keeps_drawn = keeps_states, keeps_drawn
        self.passes = CompiledPasses(self._one_pass, notice, max_passes=MAX_PASSES)

    def __call__(self, rows: Sequence[PagedRow], ids: mx.array) -> PassOutput:
        """Computes a pass over one token `ids` [R] of each row; advances the rows."""
        for row in rows:
            row.reserve(row.offset + 1)
        count, lines = len(rows), padded_width(len(rows))
        blocks = max(blocks_for(row.offset + 1) for row in rows)
        width = -(-blocks // TABLE_STEP) * TABLE_STEP
        numbers = np.zeros((lines, 2 + width), dtype=np.int32)
        for line in range(lines):
            row = rows[min(line, count - 1)]
            numbers[line, 0], numbers[line, 1] = row.offset, row.slot(row.offset)
            table = row.table[:width]
            numbers[line, 2 : 2 + len(table)] = table
        if lines > count:
            ids = mx.concatenate([ids, mx.broadcast_to(ids[-1:], (lines - count,))])
        results, written = self.passes((lines, width), ids, mx.array(numbers), self._pool.arrays)
        if not self._pool.in_place:
            self._pool.arrays = [tuple(layer) for layer in written]
        for row in rows:
            row.advance(1)
        logits, *states = (result[:count] for result in results)
        if not states:
            return PassOutput(logits)
        return (
            PassOutput(logits, states=states[0])
            if self._keeps_states
            else PassOutput(logits, drawn=states[0])
        )

    def _one_pass(
        self, ids: mx.array, numbers: mx.array, arrays: list[Arrays]
    ) -> tuple[list[mx.array], list[Arrays]]:
        pool = _PoolView(self._pool, arrays)
        slots = mx.contiguous(numbers[:, 1])  # a kernel ignores the strides of `slots`
        batch = GatheredBatch(pool, numbers[:, 0], slots, numbers[:, 2:])
        if self._keeps_states or self._keeps_drawn:
            states = self._model.hidden_states(ids, batch)
            results = [self._model.logits_of(states), states]
        else:
            results = [self._model(ids, batch)]
        return results, [] if pool.in_place else pool.arrays


def padded_width(rows: int) -> int:
    """Returns the number of rows of a pass with padding: 2**n or 3 * 2**n."""
    lines = 1 << (rows - 1).bit_length()
    return lines * 3 // 4 if rows <= lines * 3 // 4 and lines >= 4 else lines


class _PoolView(KVPool):
    """A view of a pool in a compiled pass: the pass's array arguments replace the pool's arrays."""

    def __init__(self, pool: KVPool, arrays: list[Arrays]) -> None:
        self.shape, self.in_place, self.blocks = pool.shape, pool.in_place, pool.blocks
        self.arrays = [tuple(layer) for layer in arrays]
        self.pending = []
