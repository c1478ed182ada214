"""Attention in which no bit depends on batch or chunk, for the setting `deterministic`.

The rounding of a matrix product depends on its shape, and the shape depends on the number of tokens
that are computed together. Here every product has one shape: TILE_ROWS queries against one block of
keys. The blocks of a row are combined by their softmax weights; masked blocks add an exact 0.
Together with tiled products (layers/linear.py) a token gives the same bits in any prefill chunk, in
any decode batch, and after a preemption or a resume.
"""

from __future__ import annotations

import mlx.core as mx

from mlxpool.worker.attention.dot_product import apply_softcap
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.linear import TILE_ROWS, padded_rows
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

MASKED_SCORE = -1e30  # finite, so that fully masked blocks give no NaN


def exact_attention(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int = 0
) -> mx.array:
    """Attends causally in one sequence; no bit of the result depends on batch or chunk.

    q [n, H, D], keys [1, KV, L, D], values [1, KV, L, V] -> [n, H, V]. The queries belong to the
    last n of the L tokens. Raises NotImplementedError for sinks or a window.
    """
    if scores.sinks is not None or window:
        raise NotImplementedError("no model with sinks or windows is deterministic")
    count, heads, size = q.shape
    pairs, length = keys.shape[1], keys.shape[2]
    each = heads // pairs
    tiled = padded_rows(q * scores.scale, TILE_ROWS).reshape(-1, TILE_ROWS, pairs, each, size)
    queries = tiled.transpose(0, 2, 1, 3, 4).reshape(-1, pairs, 1, TILE_ROWS * each, size)
    tiles = queries.shape[0]
    mask = _mask(length - count, tiles, each, length)
    out = _attend_blocks(queries, _blocks(keys), _blocks(values), mask, scores.softcap)
    out = out.reshape(tiles, pairs, TILE_ROWS, each, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(-1, heads, size)[:count]


def _mask(start: int, tiles: int, each: int, length: int) -> mx.array:
    """Returns the mask [tiles, 1, B, TILE_ROWS * each, KV_BLOCK_TOKENS].

    A number of the mask is 0 if the query may attend to the key, else MASKED_SCORE. The first query
    belongs to token `start`. `each` query heads share a key head. The keys of the B blocks belong
    to `length` tokens.
    """
    blocks = -(-length // KV_BLOCK_TOKENS)
    places = mx.arange(blocks * KV_BLOCK_TOKENS).reshape(1, 1, blocks, 1, KV_BLOCK_TOKENS)
    queries = start + mx.arange(tiles * TILE_ROWS).reshape(tiles, 1, 1, TILE_ROWS, 1)
    seen = mx.repeat(places <= queries, each, axis=3)
    return mx.where(seen, 0.0, MASKED_SCORE)


def _blocks(array: mx.array) -> mx.array:
    """Divides [1, KV, L, D] into blocks [1, KV, B, KV_BLOCK_TOKENS, D], padded with zeros."""
    _, pairs, length, size = array.shape
    missing = -length % KV_BLOCK_TOKENS
    whole = mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array
    return whole.reshape(1, pairs, -1, KV_BLOCK_TOKENS, size)


def _attend_blocks(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, cap: float
) -> mx.array:
    """Returns the outputs [tiles, KV, queries, D], combined from the outputs of the blocks."""
    scores = apply_softcap(queries @ keys.swapaxes(-1, -2), cap) + mask
    shares = mx.softmax(scores, axis=-1)
    # The greatest share is 1 / sum(exp(score - max)), so `sums` is log(sum(exp(score))).
    sums = mx.max(scores, axis=-1, keepdims=True) - mx.log(mx.max(shares, axis=-1, keepdims=True))
    weights = mx.exp(sums - mx.max(sums, axis=2, keepdims=True))
    return mx.sum(weights * (shares @ values), axis=2) / mx.sum(weights, axis=2)
