"""Decode attention over a block pool in float32, without tensor cores, which would round it."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import WARP_SIZE, Constant, build_kernel

INPUTS = ("q", "fresh_keys", "fresh_values", "keys", "values", "table", "positions")
HEAD_SIZES = (64, 128, 256)  # of which each lane reads 2, 4 or 8 numbers at a time
WARPS = 8
UNROLL = 4  # tokens that a warp reads at a time


def supports(heads: int, pairs: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Returns whether `attend` supports heads of these sizes."""
    fits = key_dim == value_dim and key_dim in HEAD_SIZES and heads % pairs == 0
    return fits and dtype == mx.float32


def attend(
    q: mx.array,
    fresh: tuple[mx.array, mx.array],
    pools: tuple[mx.array, mx.array],
    table: mx.array,
    positions: mx.array,
    scale: float,
    parts: int,
    window: int = 0,
) -> mx.array:
    """Attends with one token of each row.

    q [R, H, D], fresh keys and values [R, KV, D] -> [R, H, D]. Writes the token at
    `positions` [R] into the pools [blocks, KV, block, D]; `table` [R, B] are the block tables. A
    row is split into `parts`. A token sees `window` tokens; 0: all.
    """
    rows, heads, size = q.shape
    _, pairs, block, _ = pools[0].shape
    found: list[mx.array] = _kernel(heads // pairs, pairs, size, block, parts, window, scale)(
        inputs=[
            mx.contiguous(q.astype(mx.float32)),
            *(mx.contiguous(one.astype(mx.float32)) for one in fresh),
            *pools,
            table,
            positions,
        ],
        grid=(rows * WARPS * WARP_SIZE, pairs, parts),
        threadgroup=(WARPS * WARP_SIZE, 1, 1),
        output_shapes=[(rows, heads, parts, size), (rows, heads, parts)],
        output_dtypes=[mx.float32, mx.float32],
    )
    out, weight = found
    if parts == 1:
        return out[:, :, 0].astype(q.dtype)
    shares = mx.softmax(weight, axis=-1)[..., None]
    return mx.sum(out * shares, axis=2).astype(q.dtype)


@cache
def _kernel(
    group: int, pairs: int, size: int, block: int, parts: int, window: int, scale: float
) -> Any:
    constants: dict[str, Constant] = {
        "GROUP": group,
        "HEADS": pairs,
        "SIZE": size,
        "BLOCK": block,
        "PARTS": parts,
        "WINDOW": window,
        "WARPS": WARPS,
        "UNROLL": UNROLL,
        "SCALE": scale,
        "N": mx.float32,
        "OUT": mx.float32,
    }
    return build_kernel("float32_attention", INPUTS, ["out", "weight"], constants)
