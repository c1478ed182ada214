"""Attention whose every bit depends on a token and those before it alone, for `deterministic`.

How a sum of products is rounded depends on the shape of the product, and that on how many tokens
are computed at once. So here every product has one shape: TILE_ROWS queries against one block of
keys. A row's blocks are weighed one after the other; those that a query cannot see add an exact 0.
Together with products in tiles (layers/linear.py) a token gives the same bits in a prefill chunk of
any length, in a decode step in any company, and after a preemption or a resume.
"""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.attention.attention import AnyRow, Step, bent
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.linear import TILE_ROWS, padded_rows
from mlxpool.worker.scheduling.block_manager import BLOCK

NEVER = -1e30  # a score that counts for nothing, yet is finite


class ExactStep(Step):
    """A Step whose `attend` is exact."""

    def attend_row(
        self, row: AnyRow, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See Step.attend_row."""
        count, heads, size = q.shape
        pairs = k.shape[1]
        each = heads // pairs
        keys, values = row.write(layer, k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None])
        tiled = padded_rows(q * scores.scale, TILE_ROWS).reshape(-1, TILE_ROWS, pairs, each, size)
        asked = tiled.transpose(0, 2, 1, 3, 4).reshape(-1, pairs, 1, TILE_ROWS * each, size)
        tiles = asked.shape[0]
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        mask = self._mask(row, tiles, each, keys)
        out = _weighed(asked, _blocks(keys), _blocks(values), mask, scores.softcap)
        out = out.reshape(tiles, pairs, TILE_ROWS, each, size).transpose(0, 2, 1, 3, 4)
        return out.reshape(-1, heads, size)[:count]

    def _mask(self, row: AnyRow, tiles: int, each: int, keys: mx.array) -> mx.array:
        """[tiles, 1, B, TILE_ROWS * each, BLOCK]: 0 where a query may look, else NEVER."""
        blocks = -(-keys.shape[2] // BLOCK)
        places = mx.arange(blocks * BLOCK).reshape(1, 1, blocks, 1, BLOCK)
        queries = row.offset + mx.arange(tiles * TILE_ROWS).reshape(tiles, 1, 1, TILE_ROWS, 1)
        seen = mx.repeat(places <= queries, each, axis=3)
        return mx.where(seen, 0.0, NEVER)


def _blocks(array: mx.array) -> mx.array:
    """[1, KV, L, D] -> [1, KV, B, BLOCK, D], with zeros behind the end."""
    _, pairs, length, size = array.shape
    missing = -length % BLOCK
    whole = mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array
    return whole.reshape(1, pairs, -1, BLOCK, size)


def _weighed(
    asked: mx.array, keys: mx.array, values: mx.array, mask: mx.array, cap: float
) -> mx.array:
    """[tiles, KV, queries, D]: the softmax of each block, weighed by its part of the whole."""
    scores = bent(asked @ keys.swapaxes(-1, -2), cap) + mask
    shares = mx.softmax(scores, axis=-1)
    # The greatest share is 1 / sum(exp(score - max)), so this is log(sum(exp(score))).
    sums = mx.max(scores, axis=-1, keepdims=True) - mx.log(mx.max(shares, axis=-1, keepdims=True))
    weights = mx.exp(sums - mx.max(sums, axis=2, keepdims=True))
    return mx.sum(weights * (shares @ values), axis=2) / mx.sum(weights, axis=2)
